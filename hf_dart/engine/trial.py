"""Does a target compute the same on fixed shapes? Shown on trees of random tokens before it is relied on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_dart.engine.job import Job
from hf_dart.models.tolerance import allowance, coarsest
from hf_dart.models.trial import TRIAL_TREE
from hf_dart.trees.tree import DraftTree

_DEPTH = 3  # of the trial's tree
# Trees that may differ before a target is refused: rounding may send a token to another expert.
_TRIES = 3


def difference(
    job: Job, seats: list[int], nodes: int, verify: Callable[[DraftTree, Tensor], tuple[Tensor, Tensor]]
) -> tuple[float, float, torch.dtype]:
    """How far logits of fixed shapes are from the eager round's, of trees after what a call has committed.

    Args:
        job: whose session's `verify` is the reference.
        seats: B of its rows, those that `verify` is for.
        nodes: that a tree may have.
        verify: of a tree and the rows [B] that run: logits [B, N, V], and which of the nodes [B, N] they are for.

    Returns:
        The largest difference of a logit, how much is allowed, and the dtype that logits are rounded to.
    """
    session = job.session
    limits = session.limits()
    deep = min(session.verify.depth_room()) >= _DEPTH and nodes >= len(TRIAL_TREE)
    parents = torch.tensor([TRIAL_TREE if deep else TRIAL_TREE[:1]] * len(limits))
    running = torch.tensor([limit > 0 for limit in limits], device=job.model.device)
    scores = -torch.arange(parents.shape[1]).expand_as(parents).float()
    generator = torch.Generator().manual_seed(0)
    error = allowed = 0.0
    for _ in range(_TRIES):
        tokens = torch.randint(session.vocab_size, parents.shape, generator=generator)
        tree = DraftTree.from_parents(tokens, parents, _DEPTH, scores).to(running.device)
        wanted = session.verify(tree, limits)[0][seats]
        some = DraftTree.from_parents(tokens[seats], parents[seats], _DEPTH, scores[seats]).to(running.device)
        found, verified = verify(some, running[seats])
        gap = (found.double() - wanted.double()).abs().amax(-1)
        error = float(gap.masked_fill(~(verified & running[seats, None]), 0).max())
        allowed = allowance(coarsest(wanted)) * float(wanted.abs().max())
        if error <= allowed:
            break
    return error, allowed, coarsest(wanted)
