"""Drafters: what `assistant=` takes."""
