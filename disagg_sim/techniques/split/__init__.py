"""Attention and feed-forward layers on pools of their own."""
