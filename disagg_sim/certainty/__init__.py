"""Explain what a number rests on and how sure it is: breakdown, error bars, elasticities, extrapolation."""
