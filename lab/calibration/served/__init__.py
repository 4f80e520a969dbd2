"""Compare measured serving runs with the predicted steady state."""
