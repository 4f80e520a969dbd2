"""Simulate serving policies on request traces, on the physics of the analytic model."""
