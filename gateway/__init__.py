"""Speaks HTTP: turns every dialect into one neutral request for a worker. Stateless; no MLX, no tokenizer."""
