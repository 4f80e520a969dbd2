"""Context parallelism: GPUs that share the tokens of a sequence, in decode (DCP) and prefill (PCP)."""
