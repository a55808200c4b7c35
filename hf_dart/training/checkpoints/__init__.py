"""Checkpoints of a training run: written all or nothing, compared with the run that resumes from them."""
