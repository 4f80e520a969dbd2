"""What a number rests on, and how sure it is."""
