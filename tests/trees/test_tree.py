"""`DraftTree`: depths, ancestor masks, chains and padding."""

from __future__ import annotations

import torch
from support.trees import candidates_of, random_draft

from hf_dart.trees.on_host import grow_on_host
from hf_dart.trees.tree import DraftTree


def test_depths_and_ancestors() -> None:
    tokens, table = random_draft(4, 6, 5, 9)
    grown = grow_on_host(candidates_of(tokens, table, deepest=[6, 2, 0, 1]), nodes=40, beam=7)
    for tree in (grown, grown.padded(48)):
        assert int(tree.depths.max()) <= tree.max_depth
        for row in range(4):
            parents = tree.parents[row].tolist()
            for node in range(tree.size):
                above = [node]
                while parents[above[-1]] >= 0:
                    above.append(parents[above[-1]])
                assert tree.ancestors[row, node].nonzero().flatten().tolist() == sorted(above)
                assert int(tree.depths[row, node]) == len(above) - 1
        assert (tree.parents[2] == -1).all(), "a row that may not draft has its root only"


def test_chain_with_empty_nodes() -> None:
    tree = DraftTree.chain(torch.arange(8).view(2, 4), torch.tensor([4, 2]))
    assert tree.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -1, -1]]
    assert tree.depths.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert tree.ancestors[1].long().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_a_tree_that_is_filled_up() -> None:
    tokens, parents = torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 0, 1]])
    tree = DraftTree.from_parents(tokens, parents, max_depth=2, scores=torch.tensor([[0.0, -1.0, -2.0]]))
    wide = tree.padded(6)
    assert wide.tokens.tolist() == [[5, 6, 7, 5, 5, 5]]
    assert wide.parents.tolist() == [[-1, 0, 1, -1, -1, -1]]
    assert wide.depths.tolist() == [[0, 1, 2, 0, 0, 0]]
    assert torch.equal(wide.ancestors[0, :3, :3], tree.ancestors[0])
    assert wide.ancestors[0, 3:].tolist() == torch.eye(6, dtype=torch.bool)[3:].tolist()
    assert wide.scores[0, 3:].tolist() == [-torch.inf] * 3
    assert tree.padded(3) is tree
