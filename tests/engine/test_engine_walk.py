"""Processors over all nodes of a round at once, against node after node: the same tokens, in fewer operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.cases import batch
from support.compare import assert_identical, tally
from support.tiny import prompts, tiny_head, tiny_target
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hf_dart
from hf_dart import TreeConfig
from hf_dart.engine.fixed_round import FixedRound
from hf_dart.engine.processing import sees_text
from hf_dart.engine.tier import Tier
from hf_dart.trees.tree import DraftTree

pytestmark = pytest.mark.filterwarnings("error::UserWarning")
WALKED = tally("float64, tokens chosen at all nodes")
ENDS = {"eos_token_id": [3, 11, 19, 27], "pad_token_id": 0}
PROCESSORS = {
    "none": {},
    "warpers": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "of the text": {"repetition_penalty": 1.5, "min_new_tokens": 9, "suppress_tokens": [4, 5], **ENDS},
    "min-p": {"min_p": 0.05, "renormalize_logits": True},
}


class Operations(TorchDispatchMode):
    """How often each operation is called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called[str(func)] += 1
        return func(*args, **(kwargs or {}))


def made_tier(rows: int, nodes: int, **options: Any) -> Tier:
    """Of a call that is over, its rows set running again."""
    target = tiny_target("llama")
    head = tiny_head(target)
    made = hf_dart.compile(target, head, backend=None, first_tier=64)
    tree = TreeConfig(nodes=nodes, lookup=0)
    target.generate(**prompts([7, 3, 5][:rows]), assistant=head, tree_config=tree, max_new_tokens=12, **options)
    (tier,) = made.tiers
    assert tier is not None
    tier.state.ended.fill_(False)
    tier.state.limits.fill_(40)
    tier.state.ready.fill_(40)
    tier.state.noise.exponential_(1)
    return tier


@contextmanager
def verified(tier: Tier) -> Iterator[tuple[DraftTree, Tensor, Tensor]]:
    """A tree and logits under which some of its paths come true."""
    this = tier.round
    with torch.no_grad(), this.verifier.packed():
        tree = this.propose()
        logits, _, places = this.verify(tree)
        logits = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(0))
        for row in range(len(tree.tokens)):
            for node in reversed(range(1, tree.size)):
                parent = int(tree.parents[row, node])
                if parent >= 0:  # of several children the likeliest, which stands first
                    logits[places[row, parent], tree.tokens[row, node]] += 4
        if sees_text(tier.shape.processors):  # there each path comes true only if its tokens are known on the way
            for row, node in (tree.parents >= 0).nonzero().tolist():
                here = logits[places[row, node]]
                here[tree.tokens[row, node]] = here.max() + 1
        yield tree, logits, places


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.matrix), 3])
@pytest.mark.parametrize("processors", PROCESSORS)
def test_all_nodes_at_once(processors: str, rows: int, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"do_sample": sampled, **({"top_k": 0} if sampled else {}), **PROCESSORS[processors]}
    if not sampled:
        options = {name: value for name, value in options.items() if name not in PROCESSORS["warpers"]}
    tier = made_tier(rows, 20, **options)
    this, depths = tier.round, set()
    monkeypatch.setattr(FixedRound, "chooses_everywhere", lambda *args: True)
    with verified(tier) as (tree, logits, places):
        for emitted in (2, 7):  # in front of the minimum length, and across it
            tier.state.emitted.fill_(emitted)
            tier.state.noise.exponential_(1)
            wanted, found = this.walk_by_token(tree, logits, places), this.walk(tree, logits, places)
            assert torch.equal(found[2], wanted[2])
            depths |= set(wanted[2].tolist())
            for row, length in enumerate(wanted[2].tolist()):
                for part in (0, 1):
                    assert torch.equal(found[part][row, :length], wanted[part][row, :length])
    assert max(depths) > 1


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By token, every deeper node costs as many operations again; at all nodes, none."""
    taken: dict[bool, list[int]] = {}
    for everywhere in (False, True):
        monkeypatch.setattr(FixedRound, "chooses_everywhere", lambda *args, everywhere=everywhere: everywhere)
        for depth in (2, 5):
            target = tiny_target("llama")
            head = tiny_head(target, draft_length=depth)
            made = hf_dart.compile(target, head, backend=None, first_tier=64)
            options = {"do_sample": True, "top_k": 0, "max_new_tokens": 10, **PROCESSORS["of the text"]}
            target.generate(**prompts([7]), assistant=head, tree_config=TreeConfig(nodes=8, lookup=0), **options)
            (tier,) = made.tiers
            assert tier is not None
            with verified(tier) as verdict, Operations() as operations:
                tier.round.walk(*verdict)
            taken.setdefault(everywhere, []).append(sum(operations.called.values()))
    assert taken[True][0] == taken[True][1] < taken[False][0] < taken[False][1]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.matrix), 4])
@pytest.mark.parametrize("processors", ["warpers", pytest.param("of the text", marks=pytest.mark.matrix)])
def test_texts(processors: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's, with stock's seed."""
    walked = []
    by_token = FixedRound.walk_by_token
    monkeypatch.setattr(FixedRound, "walk_by_token", lambda *args: (walked.append(1), by_token(*args))[1])
    monkeypatch.setattr(FixedRound, "chooses_everywhere", lambda *args: True)
    target = tiny_target("qwen3")
    head = tiny_head(target)
    hf_dart.compile(target, head, backend=None, first_tier=64, lag=1)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 20, **PROCESSORS[processors]}
    assert_identical(target, head, batch(size, "sdpa"), into=WALKED, tree_config=TreeConfig(nodes=13), **options)
    assert not walked


def test_tokens_that_float32_cannot_tell_apart() -> None:
    """As stock, and the eager round's walk: the first of those that are equal in float32."""
    target = tiny_target("llama")
    with torch.no_grad():
        target.lm_head.weight[1::2] = target.lm_head.weight[::2] * (1 + 1e-12)
    head = tiny_head(target)
    hf_dart.compile(target, head, backend=None, first_tier=64)
    for processors in ({}, {"min_length": 9, **ENDS}):
        assert_identical(target, head, prompts([7, 3]), do_sample=False, max_new_tokens=20, **processors)


def test_where_tokens_are_chosen_everywhere() -> None:
    """Greedy without processors always; else, on a CPU, where that is no more nodes than are walked through."""
    sampled = {"do_sample": True, "top_k": 0}
    for rows, nodes, options, everywhere in (
        (1, 20, {"do_sample": False}, True),
        (1, 20, sampled, False),
        (3, 5, sampled, True),
    ):
        tier = made_tier(rows, nodes, **options)
        assert tier.round.chooses_everywhere(tier.shape.budget or rows * tier.shape.bucket) == everywhere
