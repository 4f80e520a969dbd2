"""Popularity of experts and redundant copies: the load of the fullest expert rank."""
