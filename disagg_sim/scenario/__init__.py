"""Scenarios of the simulation: from their YAML to runs and results."""
