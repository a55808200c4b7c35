"""Draft trees grown in tensors, on the device where they are verified and without reading anything back."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from hf_dart.trees.scores import Candidates, bounded, take
from hf_dart.trees.tree import DraftTree


def grow_in_tensors(candidates: Candidates, *, nodes: int, beam: int) -> DraftTree:
    """Grow one tree per row, depth by depth.

    At each depth the `beam` best paths are extended by all K candidates; every extension enters one pool, and the
    nodes with the largest cumulative score form the tree (DART, arXiv 2601.19278, section 3.3; OPT-Tree and DDTree
    pose the same problem). Width 1 gives a chain. `on_host.grow_on_host` finds the same nodes on a CPU.

    Args:
        candidates: tensors; `deepest` is a tensor [B] or None.
        nodes: N, the root included; less where d, K and the copies yield fewer.
        beam: W, how many paths of each depth are extended.

    Returns:
        The tree, on the device of the candidates, of the same N for the same shapes. A row that has fewer nodes than
        others has empty ones.
    """
    history, tokens, copied = candidates.history, candidates.tokens, candidates.copied
    batch, drafted, width = tokens.shape
    deepest, limits = max(drafted, copied.shape[1]), candidates.deepest
    root, device = history[:, -1:], tokens.device
    if nodes == 1 or deepest == 0:
        return DraftTree.chain(root)
    assert limits is None or isinstance(limits, Tensor)
    score, chances = candidates.formula.scorer(tokens, candidates.steps), bounded(candidates.chances)

    pool: list[tuple[Tensor, Tensor, Tensor]] = []  # scores, tokens and parents, [B, n] each
    paths, columns = history[:, None], torch.zeros_like(root)
    best = torch.zeros(batch, 1, dtype=candidates.steps.dtype, device=device)  # [B, W] scores of the beam
    ends = torch.full_like(root, -1)  # [B, W] where in the pool its last nodes lie; -1 for the root
    size = 0
    for depth in range(drafted):
        steps = score(depth, columns, paths)
        if depth < copied.shape[1]:
            follows = (tokens[:, depth] == copied[:, depth, None])[:, None]
            if depth:
                follows = follows & (paths[..., -1:] == copied[:, depth - 1, None, None])
            steps = torch.where(follows, steps.maximum(chances[:, depth, None, None]), steps)
        if limits is not None:
            steps = steps.masked_fill((limits <= depth)[:, None, None], -inf)
        extended = (best[..., None] + steps).flatten(1)  # [B, W * K]
        paths_here = best.shape[1]
        pool.append(
            (
                extended,
                tokens[:, depth, None].expand(-1, paths_here, -1).flatten(1),
                ends[..., None].expand(-1, -1, width).flatten(1),
            )
        )
        if depth + 1 == deepest:
            break
        if candidates.ending is not None:
            ending = candidates.ending[:, depth, None].expand(-1, paths_here, -1).flatten(1)
            extended = extended.masked_fill(ending, -inf)
        best, chosen = extended.topk(min(beam, extended.shape[1]))
        ends = chosen + size
        size += extended.shape[1]
        before, columns = chosen // width, chosen % width
        last = tokens[:, depth].gather(1, columns)[..., None]
        paths = last if history.shape[1] == 1 else torch.cat([take(paths, before)[..., 1:], last], dim=-1)
    if drafted < deepest:
        pool.append(_copies_go_on(candidates, chances, best, paths[..., -1], ends, size))

    scores, drafts, parents = (torch.cat(parts, dim=1) for parts in zip(*pool, strict=True))
    kept_scores, kept = scores.topk(min(nodes - 1, scores.shape[1]))  # best first; children lie below their parents
    drafts, parents = drafts.gather(1, kept), parents.gather(1, kept)
    node = torch.arange(1, kept.shape[1] + 1, device=device).expand_as(kept)
    node_of = torch.zeros_like(scores, dtype=torch.long).scatter_(1, kept, node)
    parents = torch.where(parents < 0, 0, node_of.gather(1, parents.clamp(min=0)))
    empty = kept_scores == -inf
    parents, drafts = parents.masked_fill(empty, -1), torch.where(empty, root, drafts)
    return DraftTree.from_parents(
        torch.cat([root, drafts], dim=1),
        torch.cat([torch.full_like(root, -1), parents], dim=1),
        deepest,
        torch.cat([torch.zeros_like(kept_scores[:, :1]), kept_scores], dim=1),
    )


def _copies_go_on(
    candidates: Candidates, chances: Tensor, best: Tensor, last: Tensor, ends: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return copied text beyond the drafted depths, after each of the W paths that end in it.

    Args:
        chances: [B, L] log-scores of the copied tokens.
        best, last, ends: [B, W] of the paths: their score, their last token, and where that lies in the pool.
        size: of the pool.

    Returns:
        Scores, tokens and parents [B, W * T] of T more tokens after each path.
    """
    copied, drafted = candidates.copied, candidates.tokens.shape[1]
    steps = chances[:, drafted:]
    count, paths = steps.shape[1], best.shape[1]
    if candidates.deepest is not None:
        deepest = torch.as_tensor(candidates.deepest, device=steps.device)
        beyond = torch.arange(drafted, copied.shape[1], device=steps.device) >= deepest[:, None]
        steps = steps.masked_fill(beyond, -inf)
    scores = best[..., None] + steps.cumsum(1)[:, None]
    if drafted:
        scores = torch.where((last == copied[:, drafted - 1, None])[..., None], scores, -inf)
    tokens = copied[:, None, drafted:].expand(-1, paths, -1)
    places = size + torch.arange(paths * count, device=steps.device).view(paths, count).expand(len(best), -1, -1)
    parents = torch.cat([ends[..., None], places[..., :-1]], dim=-1)
    return scores.flatten(1), tokens.flatten(1), parents.flatten(1)
