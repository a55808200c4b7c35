"""Blocks of drafts of one text, and the losses over them."""
