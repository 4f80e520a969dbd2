"""What arrives: length distributions of requests."""
