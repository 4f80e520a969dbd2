"""Trace-driven simulation of serving policies on the physics of the analytic model."""
