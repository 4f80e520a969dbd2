"""Plan a deployment for a model, lengths, latency limits and a size; say how sure it is and what would change it."""
