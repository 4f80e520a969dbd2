"""Times of whole passes: prefill, chunked prefill, decode step, mixed step."""
