"""Measured serving runs beside the forecast of a steady state."""
