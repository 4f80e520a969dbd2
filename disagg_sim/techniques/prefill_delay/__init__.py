"""Prefill delay: ranks wait until each has a prompt."""
