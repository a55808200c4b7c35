"""Multi-token prediction modules that lie in checkpoints of language models."""
