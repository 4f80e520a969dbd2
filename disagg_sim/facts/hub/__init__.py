"""Read models as Hugging Face publishes them: ``config.json``, and the quantisation of their checkpoints."""
