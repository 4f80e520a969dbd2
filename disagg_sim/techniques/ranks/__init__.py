"""Rank imbalance: attention-DP ranks that are not equally full, and wait for the fullest."""
