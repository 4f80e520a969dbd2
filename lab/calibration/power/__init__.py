"""Fit the power of kernels to measured watts."""
