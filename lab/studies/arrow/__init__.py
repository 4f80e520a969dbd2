"""Arrow (arXiv 2505.11916), claim by claim."""
