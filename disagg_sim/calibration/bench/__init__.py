"""Measure the GPU at hand: kernels and collectives."""
