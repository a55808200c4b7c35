"""Drafters take in texts in parts and in batches: the same draft, without masks that grow with a text's square."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.assistants import gemma4_drafter, gemma4_target
from support.guests import dflash_drafter
from support.heads import text
from support.memory import Largest
from support.modules import with_module
from support.tiny import VOCABULARY, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target
from transformers.integrations import sdpa_attention

from hf_dart import LanguageModelDrafter, MtpDrafter, attach
from hf_dart.drafters import base

PARTS = 8  # entries of one
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
Make = Callable[[Path], Any]
DRAFTERS: dict[str, Make] = {
    "head": lambda _: tiny_head(tiny_target("llama")),
    "head, windows": lambda _: tiny_head(tiny_target("llama"), num_layers=2, windows=[6, 0]),
    "head, bidirectional": lambda _: tiny_head(
        tiny_target("llama"), num_layers=2, block_attention="bidirectional", windows=[0, 11]
    ),
    "head, not shifted": lambda _: tiny_head(tiny_target("llama"), shift_logits=False),
    "eagle": lambda _: tiny_eagle_drafter(tiny_target("llama")),
    "eagle, windows": lambda _: tiny_eagle_drafter(tiny_target("llama"), num_layers=2, windows=[6, 0]),
    "diffusion": lambda _: tiny_diffusion_drafter(tiny_target("llama")),
    "language model": lambda _: LanguageModelDrafter(
        tiny_target("gemma3", seed=1, max_position_embeddings=512), tiny_target("llama")
    ),
    "dflash": lambda folder: dflash_drafter(folder, tiny_target("qwen3"), **SLIDING),
    "gemma4": lambda folder: gemma4_drafter(folder, attach(gemma4_target(vocab_size=VOCABULARY))),
    "module": lambda folder: MtpDrafter.from_target(with_module("glm4_moe", folder)[0]),
}


@torch.no_grad()
@pytest.mark.parametrize("counts", [[[29], [1], [40]], [[29, 0, 13], [3, 20, 1], [40, 9, 2]]], ids=["one", "ragged"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_those_of_a_text_taken_in_at_once(
    name: str, counts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over what was taken in before, and where a draft is asked for with the last part of it."""
    drafter = DRAFTERS[name](tmp_path)
    first, second, last = (text(drafter, part, seed) for seed, part in enumerate(counts))
    drafts = []
    for entries in (1000, PARTS):
        monkeypatch.setattr(base, "AT_ONCE", entries)
        state = drafter.begin(len(counts[0]), 10)
        drafter.read_first(state, first.next_tokens[:, :1], torch.ones(len(counts[0]), dtype=torch.long))
        drafter.extend(state, *first)
        drafter.extend(state, *second)
        drafts.append(drafter.propose(state, *last))
    torch.testing.assert_close(drafts[0].logits, drafts[1].logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(drafts[0].hidden, drafts[1].hidden, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_of_a_batch_are_drafted_for_as_if_alone(name: str, tmp_path: Path) -> None:
    """Whatever the other rows have brought: some more positions, some fewer, some none in a round."""
    drafter = DRAFTERS[name](tmp_path)
    parts = [text(drafter, counts, seed) for seed, counts in enumerate([[9, 1, 4], [0, 3, 1], [1, 0, 5], [2, 3, 1]])]

    def drafted(rows: list[int]) -> Any:
        state = drafter.begin(len(rows), 4)
        drafter.read_first(state, parts[0].next_tokens[rows, :1], torch.ones(len(rows), dtype=torch.long))
        for number, part in enumerate(parts):
            width = max(1, int(part.counts[rows].max()))
            seen = part.features[rows, :width], part.next_tokens[rows, :width], part.counts[rows]
            if number == 1:
                drafter.extend(state, *seen)
            else:
                proposal = drafter.propose(state, *seen)
        return proposal.logits

    together = drafted([0, 1, 2])
    for row in range(3):
        torch.testing.assert_close(together[row], drafted([row])[0], rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", DRAFTERS)
def test_nothing_grows_with_the_square_of_the_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, length = DRAFTERS[name](tmp_path), 320
    monkeypatch.setattr(sdpa_attention, "repeat_kv", None)  # nor are keys and values of groups of heads repeated
    taken = text(drafter, [length], 0)
    sizes = []
    for entries in (1000, PARTS):
        monkeypatch.setattr(base, "AT_ONCE", entries)
        for take_in in (drafter.extend, drafter.propose):
            with Largest() as largest, Largest(lambda one: one.dtype == torch.long) as ages:
                take_in(drafter.begin(1, length), *taken)
            sizes.append(largest.elements)
            assert ages.elements < length**2 // 2 or not name.startswith(("head", "eagle"))
    assert max(sizes[2:]) < length**2 // 2
    # Diffusion has parts of its own, and the last two no mask of all pairs of positions.
    assert name in ("diffusion", "dflash", "gemma4") or min(sizes[:2]) >= length**2
