"""Run sweeps: YAML to cases and blocks, backends that compute them, the store, the tables."""
