"""Many calls of `generate` at once, each with the text that it has alone."""
