"""Fit efficiencies to measured kernels and served runs, and compare predictions with both."""
