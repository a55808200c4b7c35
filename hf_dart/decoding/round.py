"""The round: propose, grow, verify, walk, commit."""

from __future__ import annotations

from hf_dart.decoding.session import Session


def one_round(s: Session) -> None:
    """Bring every row that runs on by at least one token: by the target's own tokens on the path they take in a tree.

    Raises:
        Exception: whatever the target, the drafter, a processor, a criterion or a streamer raises; `finish.break_off`
            then leaves the call as stock would have.
    """
    with s.stats.phase("draft"):
        budget = s.budget()
        proposal = s.drafter_runner.propose(s.seen, budget.mode, s.score)  # d distributions per row, or None
    with s.stats.phase("grow"):
        tree = s.grow(proposal, budget)  # [B, N] nodes, the root first
    with s.stats.phase("verify"):
        logits, features = s.verify(tree, budget.limits)  # [B, N, V], [B, N, F]: the one forward of the target
    with s.stats.phase("walk"):
        accepted = s.walk(tree, logits, budget.limits)  # the target's own choice at every node that its text passes
    with s.stats.phase("commit"):
        s.cache.commit(accepted.path, accepted.counts)
        s.seen = s.rows.take(features, accepted.path, accepted.counts)
        s.count(tree, accepted, budget)
