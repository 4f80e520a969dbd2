"""Which configurations exist, what each scores, and which are Pareto optimal."""
