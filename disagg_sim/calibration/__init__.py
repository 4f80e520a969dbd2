"""Measured kernels and served runs: fits, residuals, validation, uncertainty."""
