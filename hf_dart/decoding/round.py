"""The round: propose, grow, verify, walk, commit."""

from __future__ import annotations

from torch import Tensor

from hf_dart.decoding.session import Budget, Session
from hf_dart.trees.tree import DraftTree


def one_round(s: Session) -> None:
    """Bring every row that runs on by at least one token: by the target's own tokens on the path they take in a tree.

    Raises:
        Exception: whatever the target, the drafter, a processor, a criterion or a streamer raises; `finish.break_off`
            then leaves the call as stock would have.
    """
    tree, budget = drafted(s)
    with s.stats.phase("verify"):
        logits, features = s.verify(tree, budget.limits)  # [B, N, V], [B, N, F]: the one forward of the target
    accept(s, tree, budget, logits, features)


def drafted(s: Session) -> tuple[DraftTree, Budget]:
    """Draft the trees [B, N] of the coming round, the root first, and say what each row may emit in it."""
    with s.stats.phase("draft"):
        budget = s.budget()
        proposal = s.propose(budget.drafted)  # d distributions per row, or None
    with s.stats.phase("grow"):
        return s.grow(proposal, budget), budget


def accept(s: Session, tree: DraftTree, budget: Budget, logits: Tensor, features: Tensor) -> None:
    """Emit the target's own tokens on the path that they take in each tree, and keep its nodes."""
    with s.stats.phase("walk"):
        accepted = s.walk(tree, logits, budget.limits)  # the target's own choice at every accepted node
    with s.stats.phase("commit"):
        s.cache.commit(accepted.path, accepted.counts)
        s.seen = s.rows.take(features, accepted.path, accepted.counts)
        s.count(tree, accepted, budget)
    s.tell(logits, accepted)
