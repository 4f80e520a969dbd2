"""The analytic model: what a pass multiplies and moves, and how long that takes."""
