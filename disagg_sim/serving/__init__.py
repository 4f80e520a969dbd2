"""Serving modes with one table of points: co-located, piggybacked, disaggregated; matching of pools."""
