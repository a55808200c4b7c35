"""Gemma 4's own assistants."""
