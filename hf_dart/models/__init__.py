"""What is known of a target, whoever drafts for it."""
