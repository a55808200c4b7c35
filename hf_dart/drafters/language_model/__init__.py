"""A causal language model that drafts for a larger one of the same vocabulary."""
