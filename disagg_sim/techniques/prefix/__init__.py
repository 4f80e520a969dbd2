"""Prefix reuse: prompts whose start a cache holds, in HBM or in a tier below."""
