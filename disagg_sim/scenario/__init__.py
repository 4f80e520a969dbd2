"""Run scenarios of the simulation: from YAML to runs and results."""
