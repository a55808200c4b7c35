"""Trees through modules that keep running states, such as linear attention: level by level, or at once."""
