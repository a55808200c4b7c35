"""Diffusion drafters: a masked diffusion language model drafts (SpecDiff)."""
