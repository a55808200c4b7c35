"""The diffusion drafter: its reverse process, its cache, its files."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import GREEDY
from support.compare import assert_identical
from support.heads import histories, one_pass
from support.sentences import refused
from support.tiny import VOCABULARY, prompts, tiny_diffusion_drafter, tiny_target
from torch import Tensor

from hf_dart import DiffusionDrafter
from hf_dart.drafters.diffusion.drafter import MASK, DiffusionConfig

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
KINDS: dict[str, dict[str, Any]] = {
    "shared": {},
    "features": {"feature_layers": [0, 2]},
    "other widths": {"hidden_size": 24, "num_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1},
}


def reverse_process(drafter: DiffusionDrafter, features: Tensor, tokens: Tensor, depth: int) -> Tensor:
    """Logits [d, V] of `propose`, from scratch in every step, which reveals its share of the slots."""
    steps = min(drafter.denoise_steps, depth)
    slots, kept = [MASK] * depth, torch.zeros(depth, VOCABULARY, dtype=torch.float64)
    for step in range(1, steps + 1):
        logits = one_pass(drafter, features, tokens, slots)
        masked = [slot for slot in range(depth) if slots[slot] == MASK]
        kept[masked] = logits[masked]
        chances = logits.softmax(-1).max(-1)
        if drafter.unmasking == "confidence":
            masked.sort(key=lambda slot: float(chances.values[slot]), reverse=True)
        for slot in masked[: depth * step // steps - (depth - len(masked))]:
            slots[slot] = int(chances.indices[slot])
    return kept


@torch.no_grad()
@pytest.mark.parametrize("unmasking", ["confidence", "left_to_right"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_drafts_are_the_reverse_process(target: Any, kind: str, unmasking: str, batch: int) -> None:
    """Ragged, over many rounds of any depth and number of steps; the cache keeps nothing that a slot wrote."""
    drafter = tiny_diffusion_drafter(target, unmasking=unmasking, **KINDS[kind])
    choose = random.Random(batch)
    state = drafter.begin(batch, 2)  # too small: it has to grow
    for number, (seen, features, tokens) in enumerate(histories(drafter.config.features_width, batch, 10)):
        if number % 4 == 3:
            drafter.extend(state, *seen)
            continue
        drafter.denoise_steps = choose.choice([1, 2, 3, 9])
        depth = choose.choice([None, 1, 3, 5])
        proposal = drafter.propose(state, *seen, depth)
        assert state.lengths.tolist() == [len(row) for row in tokens]
        for row, count in enumerate(seen.counts):
            if count:
                # A shorter draft is the beginning of the whole block, whose slots see each other.
                expected = reverse_process(drafter, features[row], tokens[row], 5)[:depth]
                torch.testing.assert_close(proposal.logits[row], expected, **CLOSE)
                torch.testing.assert_close(drafter.logits(proposal.hidden[row]), expected, **CLOSE)


@torch.no_grad()
def test_a_long_prompt_costs_as_much_as_it_is_long(target: Any) -> None:
    """Taken in by windows, it leaves what one pass over all of it would."""
    drafter = tiny_diffusion_drafter(target)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (2, 40), generator=generator)
    none, counts = torch.zeros(2, 40, 0), torch.tensor([40, 23])
    whole, parts = drafter.begin(2, 8), drafter.begin(2, 8)
    drafter.extend(parts, none, tokens, counts)
    for place in range(40):
        real = (counts > place).long()
        drafter.extend(whole, none[:, :1], tokens[:, place : place + 1], real)
    assert whole.lengths.tolist() == parts.lengths.tolist() == [40, 23]
    last = torch.tensor([[7], [8]]), torch.tensor([1, 1])
    drafts = [drafter.propose(state, none[:, :1], *last).logits for state in (whole, parts)]
    torch.testing.assert_close(*drafts, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 3])
def test_what_a_draft_costs(target: Any, batch: int) -> None:
    """The text is read once; T steps are T passes, over the block alone; the last layer gives what is asked for."""
    drafter = tiny_diffusion_drafter(target, denoise_steps=3, context_window=24)
    seen: dict[int, list[int]] = {0: [], 1: []}
    for index, layer in enumerate(drafter.layers):
        layer.mlp.register_forward_pre_hook(lambda _, given, index=index: seen[index].append(given[0].shape[1]))
    none, tokens = torch.zeros(batch, 9, 0), torch.full((batch, 9), 3)
    state = drafter.begin(batch, 40)
    drafter.extend(state, none, tokens, torch.full((batch,), 9))
    assert (seen[0], seen[1]) == ([9], [1])
    for steps, passes in ((3, 3), (1, 1), (9, 5)):
        seen[0].clear(), seen[1].clear()
        drafter.denoise_steps = steps
        drafter.propose(state, none[:, :2], tokens[:, :2], torch.full((batch,), 2))
        assert (seen[0], seen[1]) == ([2 + 4, *[4] * (passes - 1)], [5, *[4] * (passes - 1)])


@torch.no_grad()
def test_prompts_without_ids(target: Any) -> None:
    """Embeddings are read as their tokens."""
    tokens = torch.tensor([[3, 9, 4, 17]])
    embeddings = target.get_input_embeddings()(tokens)
    drafter = tiny_diffusion_drafter(target)
    assert torch.equal(drafter.embed(embeddings), drafter.embed(tokens))


# ---- files and fit ------------------------------------------------------------------------------------------


def test_what_fits(target: Any, tmp_path: Path) -> None:
    """One that reads no features fits targets of any depth; files of earlier versions say that they share a table."""
    for number, kind in enumerate(("shared", "features")):
        tiny_diffusion_drafter(target, **KINDS[kind]).save_pretrained(tmp_path / str(number))
    wider, deeper = tiny_target("qwen3", hidden_size=64), tiny_target("llama", num_hidden_layers=3)
    larger = tiny_target("qwen3", vocab_size=64)
    wrong = {(0, wider): "embedding width", (1, wider): "embedding width", (1, deeper): "layers", (0, larger): "rows"}
    for (number, other), words in wrong.items():
        load = partial(DiffusionDrafter.from_pretrained, str(tmp_path / str(number)), target=other)
        refused(load, ValueError, words)
    file = tmp_path / "0" / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "share_embeddings": False}))
    load = partial(DiffusionDrafter.from_pretrained, str(file.parent), target=deeper)
    refused(load, ValueError, "has no share_embeddings")
    file.write_text(json.dumps({**content, "share_embeddings": True}))
    drafter = load()
    assert "share_embeddings" not in drafter.config.to_dict()
    assert_identical(deeper, drafter, prompts([7]), **GREEDY)
    refused(lambda: drafter.reduce_vocabulary([3]), ValueError, "scores all tokens")


@pytest.mark.parametrize(
    "fields", [{"denoise_steps": 0}, {"num_layers": 0}, {"unmasking": "random"}, {"context_window": 5}], ids=str
)
def test_config_says_what_is_wrong(target: Any, fields: dict[str, Any]) -> None:
    refused(lambda: DiffusionConfig.for_target(target, **{"draft_length": 5, **fields}), ValueError, next(iter(fields)))
