"""Sweeps: YAML to cases and blocks, backends that compute them, the store that keeps them, the tables."""
