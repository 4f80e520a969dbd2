"""Measured kernels to fits, and fits judged on rows that they did not see."""
