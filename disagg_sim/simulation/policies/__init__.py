"""Serving policies: one file a system."""
