""" "Beyond the Buzz" (arXiv 2506.05508), claim by claim."""
