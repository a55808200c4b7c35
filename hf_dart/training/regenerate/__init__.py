"""Training text in the words of the target itself: written by the model or by a server."""
