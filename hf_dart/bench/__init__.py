"""Measuring: speed against stock, side by side in one run, and whether the output was the same."""
