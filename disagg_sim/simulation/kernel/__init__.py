"""Simulate instances in compiled code: step tables, kernel, and the Python interface."""
