"""Training text in the words of the target itself."""
