"""Serving policies, one file or folder each."""
