"""Captured parts: rounds whose target forward, and draft, run on fixed shapes.

The round is that of every call (`hf_dart.decoding.round`). Two of its parts launch a few thousand small kernels: the
target's forward over a tree, and the draft. On a GPU that takes longer than the target's weights take to be read; on a
CPU, operators of small targets cost more than their arithmetic. Here both run on tensors of fixed shapes that stay
where they are, so that they can be compiled by `torch.compile` without a graph break and replayed as CUDA graphs
(`graphs.launched`). Between them the host ranks drafts, grows trees and chooses tokens as in every other call, which is
why every drafter, processor and criterion works, and tokens are the same.

A tier (`tier.Tier`) holds caches of T slots for the text and, after them, N slots for a tree. When a row might outgrow
T, the call goes on in the tier twice as long: what attention reads follows the text, not what might become of it. Trees
are filled up to a power of two with empty nodes.

`compile` turns it on for a pair of target and drafter; `engine.Engine` says what each call takes, and leaves it to the
session's own parts where the target cannot run on fixed shapes, or a launch fails.
"""
