"""The analytic model: what a pass computes and moves, and how long that takes."""
