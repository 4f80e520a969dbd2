"""DOPD: its pools, its batches and its policy."""
