"""One budget of nodes for all rows of a batch, spent on the likeliest paths, whatever their row.

Trees of one size per row verify unlikely nodes of rows that are hard to foresee, and nodes of rows that have ended.
Here trees may grow larger than their share; of all nodes of all rows the M likeliest are kept (as DSpark's scheduler
admits drafts, arXiv 2607.05147, by survival), rows that have ended or stand still get none, and the target runs
over those M alone, side by side as one row of tokens. Attention alone knows rows: there, queries go back to their trees
(`hf_dart.models.packed`), and keys and values to the slots of their rows (`cache.FixedCache`).

Attention itself reads the keys and values of ended rows too, as far as the tier goes. So once rounds for half as many
rows will do (`batch_sizes`), those go on with the rows that run, and the others are no part of them.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from hf_dart.trees.tree import DraftTree


def shared(tree: DraftTree, running: Tensor, budget: int) -> DraftTree:
    """The likeliest `budget` nodes of all rows; what else the trees hold becomes empty.

    Args:
        tree: [B, N] nodes by falling score in each row, as `grow_in_tensors` leaves them.
        running: [B] rows that take part. Their roots are kept; there are no more of them than the budget.
        budget: M.
    """
    assert tree.scores is not None
    scores = tree.scores.masked_fill(~running[:, None], -inf)
    scores[:, 0] = torch.where(running, inf, -inf)
    best = scores.flatten().sort(descending=True, stable=True)
    kept = torch.zeros_like(best.values, dtype=torch.bool).index_fill(0, best.indices[:budget], True)
    # A parent stands before its children and is likelier: in each row the first nodes are kept, whole paths.
    kept = kept.view_as(scores) & (scores > -inf)
    ancestors = tree.ancestors & kept[..., None] & kept[:, None]
    return DraftTree(
        torch.where(kept, tree.tokens, tree.tokens[:, :1]),
        tree.parents.masked_fill(~kept, -1),
        tree.depths.masked_fill(~kept, 0),
        ancestors | torch.eye(tree.size, dtype=torch.bool, device=kept.device),
        tree.max_depth,
        tree.scores.masked_fill(~kept, -inf),
    )


def computed(tree: DraftTree, running: Tensor, budget: int) -> Tensor:
    """[M] which of the B N nodes are run through the target: all that are not empty, and empty ones to fill up.

    Args: as for `shared`, which leaves `tree` with no more nodes than that.
    """
    real = tree.parents >= 0
    real[:, 0] = running
    return real.flatten().to(torch.uint8).sort(descending=True, stable=True).indices[:budget]


def batch_sizes(running: int, batch: int) -> list[int]:
    """How many rows, the fewest first, rounds may have while so many of `batch` are running: powers of two, or all."""
    fewest = (running - 1).bit_length()
    return [1 << power for power in range(fewest, batch.bit_length()) if 1 << power < batch] + [batch]
