"""Reproduce published studies: claims as code, and the runs and frontiers that test them."""
