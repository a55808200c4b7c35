"""Heads on the Hub: their cards, what is pushed, and what to say when something is not there."""
