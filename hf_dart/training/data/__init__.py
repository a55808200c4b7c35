"""What to train on: sources, conversations, token ids, packed rows."""
