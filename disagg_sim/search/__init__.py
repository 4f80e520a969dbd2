"""Enumerate configurations, score them, and find the Pareto-optimal ones."""
