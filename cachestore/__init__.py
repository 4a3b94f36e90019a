"""A library over one directory of content-addressed KV blocks, shared by all workers. Knows bytes, not models."""
