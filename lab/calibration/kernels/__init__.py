"""Fit measured kernels, and test the fits on held-out rows."""
