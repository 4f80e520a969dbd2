"""Serving modes: one table of points for all, disaggregated matching, rate matching of pools."""
