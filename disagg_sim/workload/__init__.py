"""Describe the requests: length distributions, arrival processes, traces from files or drawn, statistics."""
