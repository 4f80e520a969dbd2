"""Measure kernels and collectives on the user's own GPU."""
