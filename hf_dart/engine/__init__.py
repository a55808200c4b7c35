"""Captured parts: rounds whose target forward, and draft, run on fixed shapes.

Two parts of a round (`hf_dart.decoding.session`) launch a few thousand small kernels: the target's forward over a tree,
and the draft. Here both run on tensors of fixed shapes that stay where they are, so that they can be compiled by
`torch.compile` without a graph break and replayed as CUDA graphs (`graphs.Capture`). Between them the host ranks
drafts, grows trees and chooses tokens as in every other call, so that tokens are the same.

A tier (`tier.Tier`) holds caches of T slots for the text and, after them, N slots for a tree, filled up to a power of
two with empty nodes. When a row might outgrow T, the call goes on in the tier twice as long.
"""
