"""Parts of the captured round against plain references: packed attention, two-step top-k, trees that are filled up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import assert_identical
from support.tiny import prompts, tiny_head, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hf_dart
from hf_dart import TreeConfig
from hf_dart.decoding.topk import largest
from hf_dart.drafters.layers import attend
from hf_dart.engine.attention import PackedVerifier
from hf_dart.models.attention import TreeAttention, attends_to_trees
from hf_dart.models.packed import NODES, attend_in_groups, for_groups, packed_attention
from hf_dart.trees.tree import DraftTree


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("masked", [True, False])
def test_packed_attention_is_stocks(groups: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key, value = normal(2, 2 * groups, 5, 8), normal(2, 2, 11, 8), normal(2, 2, 11, 6)
    hidden = torch.rand((2, 1, 5, 11), generator=generator) < 0.4
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, torch.finfo(torch.float64).min)
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    arguments = {"attention_mask": mask if masked else None, "scaling": 0.3, "is_causal": False}
    found, _ = packed_attention(module, query, key, value, **arguments)  # type: ignore[arg-type]
    wanted, _ = sdpa_attention_forward(module, query, key, value, **arguments)  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted)
    assert found.is_contiguous()


@pytest.mark.parametrize("groups", [1, 3])
def test_attention_in_groups_is_pytorchs(groups: int) -> None:
    """Under the masks of heads and DFlash drafters, whether made for groups before or not."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2 * groups, 5, 8, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(2, 2, 11, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(2, 1, 5, 11, generator=generator) < 0.6
    mask[..., 0] = True
    wanted = attend(query, key, value, mask)
    for masks in (mask, for_groups(mask, groups)):
        torch.testing.assert_close(attend_in_groups(query, key, value, masks), wanted)


def test_only_the_thread_of_the_round_is_packed() -> None:
    target = tiny_target("llama")
    found: list[bool] = []

    def look() -> None:
        found.append(attends_to_trees())

    with TreeAttention(target).packed():
        look()
        other = Thread(target=look)
        other.start()
        other.join()
    look()
    assert found == [True, False, False]
    with pytest.raises(RuntimeError, match="inside"), TreeAttention(target).packed():
        raise RuntimeError("inside")
    look()
    with TreeAttention(tiny_target("llama", "eager")).packed():
        look()
    assert not any(found[1:])


@pytest.mark.parametrize(
    ("family", "types", "size"),
    [("qwen3", ["full_attention"] * 4, 1), ("gemma3", ["sliding_attention", "full_attention"] * 2, 3)],
    ids=["qwen3", "gemma3"],
)
def test_masks_are_made_once_for_all_layers(
    family: str, types: list[str], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not again in each of four; by a target that hands nothing down, they are."""
    target = tiny_target(family, num_hidden_layers=4, layer_types=types)
    head = tiny_head(target)
    made = hf_dart.compile(target, head, backend=None, first_tier=64)
    options = {"do_sample": False, "max_new_tokens": 8, "tree_config": TreeConfig(nodes=8)}
    assert_identical(target, head, prompts([7, 3, 5][:size]), **options)
    (tier,) = made.tiers
    assert tier is not None
    with counted() as operations:
        tier.round.run_uncompiled()
    assert operations["aten.repeat.default"] == len(set(types))
    monkeypatch.setattr(PackedVerifier, "extra_inputs", lambda *args: {NODES: args[-1]} if size > 1 else {})
    with counted() as operations:
        tier.round.run_uncompiled()
    assert operations["aten.repeat.default"] == 4


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each operation is called meanwhile."""
    with _Counter() as counter:
        yield counter.operations


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 9000),
    k=st.integers(1, 20),
    levels=st.sampled_from([2, 5, 1000, None]),
    seed=st.integers(0, 2**31),
)
def test_top_k_in_two_steps(size: int, k: int, levels: int | None, seed: int) -> None:
    """With few levels nearly everything is a tie: then the order of places decides, as in a stable sort."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn((2, 3, size), generator=generator)
    if levels is not None:
        scores = torch.randint(levels, scores.shape, generator=generator).float()
    k = min(k, size)
    values, places = largest(scores, k)
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, ordered[..., :k])
    assert torch.equal(places, order[..., :k])
    assert torch.equal(values, scores.topk(k).values)


def test_top_k_of_what_is_nowhere() -> None:
    """Places after the end, which fill up the last chunk, are never named."""
    scores = torch.full((1, 20 * 256 + 3), -torch.inf)
    values, places = largest(scores, 4)
    assert places.tolist() == [[0, 1, 2, 3]]
    assert values.tolist() == [[-torch.inf] * 4]


def test_a_tree_that_is_filled_up() -> None:
    tokens, parents = torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 0, 1]])
    tree = DraftTree.from_parents(tokens, parents, max_depth=2, scores=torch.tensor([[0.0, -1.0, -2.0]]))
    wide = tree.padded(6)
    assert wide.tokens.tolist() == [[5, 6, 7, 5, 5, 5]]
    assert wide.parents.tolist() == [[-1, 0, 1, -1, -1, -1]]
    assert wide.depths.tolist() == [[0, 1, 2, 0, 0, 0]]
    assert torch.equal(wide.ancestors[0, :3, :3], tree.ancestors[0])
    assert wide.ancestors[0, 3:].tolist() == torch.eye(6, dtype=torch.bool)[3:].tolist()
    assert wide.scores is not None
    assert wide.scores[0, 3:].tolist() == [-torch.inf] * 3
    assert tree.padded(3) is tree
