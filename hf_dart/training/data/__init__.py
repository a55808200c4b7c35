"""Training data: sources, conversations, token ids, packed rows."""
