"""EAGLE heads: one decoder layer that drafts token by token."""
