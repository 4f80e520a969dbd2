"""DOPD, claim by claim."""
