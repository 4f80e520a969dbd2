"""Trace-driven simulation of serving systems on the physics of the analytic model."""
