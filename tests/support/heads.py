"""Heads as if trained, and what they draft."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hf_dart import DartHead, DiffusionDrafter, load_drafter
from hf_dart.drafters.base import Verified
from hf_dart.drafters.layers import take
from hf_dart.models.verify import features_request, gather_features
from hf_dart.training.objective.blocks import build_blocks
from support.tiny import VOCABULARY


def shaken(head: DartHead, seed: int = 1) -> DartHead:
    """As if the active adapter had been trained: LoRA's second factors start at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.2)
    return head


def drafts(head: DartHead) -> torch.Tensor:
    """[d, V] after some random positions."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(1, 6, head.config.features_width, generator=generator, dtype=torch.float64)
    tokens = torch.randint(VOCABULARY, (1, 6), generator=generator)
    with torch.no_grad():
        return head.propose(head.begin(1, 8), features, tokens, torch.tensor([6])).logits[0]


def text(drafter: Any, counts: list[int], seed: int) -> Verified:
    """Random positions of rows, and nonsense after those of a shorter one."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(counts), max(counts))
    features = torch.randn(*shape, 32 * len(drafter.feature_layers), generator=generator, dtype=torch.float64)
    return Verified(features, torch.randint(VOCABULARY, shape, generator=generator), torch.tensor(counts))


def histories(width: int, batch: int, rounds: int) -> Iterator[tuple[Verified, list[Tensor], list[Tensor]]]:
    """Random positions that rows bring, round by round, with all features [T, F] and tokens [T] of each row so far.

    One row alone brings some in every round; of several, each may bring none.
    """
    generator, choose = torch.Generator().manual_seed(1), random.Random(batch)
    features: list[Tensor] = [torch.zeros(0, width, dtype=torch.float64) for _ in range(batch)]
    tokens: list[Tensor] = [torch.zeros(0, dtype=torch.long) for _ in range(batch)]
    for number in range(rounds):
        counts = [choose.choice([0, 1, 2, 9] if batch > 1 and number else [1, 2, 9]) for _ in range(batch)]
        new = torch.randn(batch, max(1, *counts), width, generator=generator, dtype=torch.float64)
        following = torch.randint(VOCABULARY, new.shape[:2], generator=generator)
        for row, count in enumerate(counts):
            features[row] = torch.cat([features[row], new[row, :count]])
            tokens[row] = torch.cat([tokens[row], following[row, :count]])
            new[row, count:] = 1e6  # what stands after a row's count must not be looked at
        yield Verified(new, following, torch.tensor(counts)), features, tokens


def in_one_pass(head: DartHead, features: Tensor, tokens: Tensor) -> Tensor:
    """Draft logits [d, V] after T positions, by the training pass with one block after the last of them."""
    documents = torch.zeros(1, len(tokens) + 1, dtype=torch.long)
    anchors = torch.tensor([[len(tokens) - 1]])
    bidirectional = head.config.block_attention == "bidirectional"
    shifted = head.config.shift_logits
    blocks = build_blocks(documents, anchors, head.draft_length, bidirectional, shifted=shifted)
    hidden = head(features[None], head.embed(tokens)[None], blocks.positions, blocks.mask)
    return head.logits(take(hidden, blocks.entries))[0, : head.draft_length]


def one_pass(drafter: DiffusionDrafter, features: Tensor, tokens: Tensor, slots: list[int]) -> Tensor:
    """Logits [d, V] of a diffusion drafter's block, known tokens or `MASK`, after T tokens [T] with features [T, F]."""
    text, size = len(tokens), len(tokens) + len(slots) - 1
    places = torch.arange(size)
    mask = (places <= places[:, None]) & (places > places[:, None] - drafter.config.context_window)
    mask[text:, text:] = True
    ids = torch.cat([tokens, torch.tensor(slots[:-1], dtype=torch.long)])
    hidden = drafter(ids[None], features[None], places[None], mask[None, None])
    return drafter.logits(hidden)[0, text - 1 :]


def peagle_head(target: Any, seed: int = 0, **config: Any) -> DartHead:
    fields = {"mask_mode": "peagle", "mask_token_id": 47, "draft_length": 5, "initializer_range": 0.3}
    head = DartHead.from_target(target, seed=seed, **{**fields, **config})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for name, weight in head.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
    return head


@torch.no_grad()
def features_of(target: Any, layers: list[int], ids: Tensor) -> Tensor:
    """Hidden states [1, T - 1, F] of a target at these layers for all but the last token of a text [1, T]."""
    outputs = target(input_ids=ids[:, :-1], use_cache=False, **features_request(layers))
    return gather_features(outputs, layers, ids[:, :-1])


def draft_after(target: Any, drafter: Any, ids: Tensor, depth: int | None = None, score: Any = None) -> Any:
    """Return the draft after a text [1, T], taken in by two calls; its tokens are ranked by `score`, if given."""
    features = features_of(target, drafter.feature_layers, ids)
    state = drafter.begin(1, 4)
    drafter.extend(state, features[:, :3], ids[:, 1:4], torch.tensor([3]))
    last = (state, features[:, 3:], ids[:, 4:], torch.tensor([features.shape[1] - 3]), depth)
    return drafter.propose(*last) if score is None else drafter.propose_ranked(*last, score)


def assert_saved(drafter: Any, target: Any, folder: Any) -> Any:
    """Check that a drafter is the same after it was saved and loaded, and return it."""
    drafter.save_pretrained(folder)
    before = torch.get_rng_state()
    again = load_drafter(str(folder), target=target)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(again) is type(drafter)
    assert not again.training
    configs = [{**one.config.to_dict(), "_name_or_path": None} for one in (again, drafter)]
    assert configs[0] == configs[1]
    states = [one.state_dict() for one in (again, drafter)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    # Products depend on where weights lie in memory.
    torch.testing.assert_close(drafts(again), drafts(drafter), rtol=1e-9, atol=1e-9)
    return again


def assert_beam(
    proposal: Any, row: int, after: Callable[[list[int]], Tensor], score: Callable[[int, Tensor], Tensor] | None = None
) -> None:
    """Check that the draft of a row goes on from the best way to each of the best tokens of every depth.

    `after` a path of drafted tokens come log-probabilities [V]; `score` gives others that paths are ranked by.
    """
    score = score or (lambda level, chances: chances)
    known, width = after([]), proposal.branches.shape[-1]
    assert torch.allclose(known, proposal.logits[row, 0], atol=1e-5)
    first = score(0, known)
    paths = [([token], float(first[token])) for token in first.topk(width).indices.tolist()]
    for level in range(proposal.logits.shape[1] - 1):
        assert proposal.branches[row, level].tolist() == [path[-1] for path, _ in paths]
        marginal, found = torch.zeros_like(known), dict[int, tuple[list[int], float]]()
        for place, (path, so_far) in enumerate(paths):
            expected = after(path)
            assert torch.allclose(expected, proposal.conditional[row, level, place], atol=1e-5)
            marginal += (so_far + expected).exp()
            for token, chance in enumerate((so_far + score(level + 1, expected)).tolist()):
                if token not in found or chance > found[token][1]:
                    found[token] = ([*path, token], chance)
        assert torch.allclose(marginal.log().clamp(min=-1e30), proposal.logits[row, level + 1], atol=1e-5)
        paths = sorted(found.values(), key=lambda path: -path[1])[:width]
