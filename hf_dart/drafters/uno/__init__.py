"""The target drafts for itself: through a LoRA, a block of masked tokens in one pass."""
