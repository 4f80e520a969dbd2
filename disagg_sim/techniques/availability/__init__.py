"""Availability: failures of GPUs and hosts, the instances that they take down, and spares."""
