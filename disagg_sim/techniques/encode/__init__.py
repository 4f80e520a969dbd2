"""Encode pools: images become embeddings on GPUs of their own."""
