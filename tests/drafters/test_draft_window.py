"""`draft_window` and `draft_sink`: which entries a drafter attends to in a longer text, and at which positions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.assistants import gemma4_drafter, gemma4_target
from support.checkpoints import save
from support.eagle3 import eagle3_config, eagle3_tensors
from support.guests import dflash_drafter
from support.heads import text
from support.tiny import VOCABULARY, nearly, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target

from hf_dart import DartHead, EagleDrafter, LanguageModelDrafter, attach
from hf_dart.cache.slot_cache import SlotCache
from hf_dart.drafters.base import Verified

WINDOW, SINK = 24, 3
LENGTHS = [61, 20, 40]  # of rows: their windows are full at different times, or never
LAST = 4  # positions that come with the draft
ENDS = [length + LAST for length in LENGTHS]
# Of one layer, or of keys that no layer comes before: an entry does not depend on those that it attended to.
ALONE: dict[str, Callable[[Path], Any]] = {
    "head": lambda _: tiny_head(tiny_target("llama")),
    "head, scaled": lambda _: tiny_head(tiny_target("llama"), rope_scale=1.3, shift_logits=False),
    "head, bidirectional": lambda _: tiny_head(tiny_target("llama"), block_attention="bidirectional"),
    "eagle": lambda _: tiny_eagle_drafter(tiny_target("llama")),
    "dflash": lambda folder: dflash_drafter(folder, tiny_target("qwen3")),
}
DEEP: dict[str, Callable[[Path], Any]] = {
    "head, layers": lambda _: tiny_head(tiny_target("llama"), num_layers=2, windows=[9, 0]),
    "diffusion": lambda _: tiny_diffusion_drafter(tiny_target("llama"), context_window=30),
}


def drafted(drafter: Any, rows: list[list[int]]) -> tuple[Any, SlotCache]:
    """A draft after these positions of each row, the last ones of which come with it, and the drafter's state."""
    features, tokens, _ = text(drafter, ENDS, 1)
    counts, width = torch.tensor([len(row) for row in rows]), max(map(len, rows))
    at = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    places = torch.arange(len(rows))[:, None]
    seen = Verified(features[places, at], tokens[places, at], counts)
    state = drafter.begin(len(rows), 10)
    ahead, last = seen.split(LAST)
    for part in ahead.parts(5):
        drafter.extend(state, *part)
    return drafter.propose(state, *last), state


@pytest.mark.parametrize("counts", [[9, 2, 6], [3, 0, 2], [5, 4, 4]])
def test_the_last_positions_are_no_more_than_asked_for(counts: list[int]) -> None:
    """Chunks may be wider than their longest row; captured drafts take no more than they were made for."""
    tokens = torch.arange(1, 28).view(3, 9)
    ahead, last = Verified(tokens[..., None].float(), tokens, torch.tensor(counts)).split(4)
    assert last.next_tokens.shape == last.features.shape[:2] == (3, 4)
    for row, count in enumerate(counts):
        kept = [*ahead.next_tokens[row, : ahead.counts[row]], *last.next_tokens[row, : last.counts[row]]]
        assert kept == tokens[row, :count].tolist()
        assert last.counts[row] == min(count, 4)


@torch.no_grad()
@pytest.mark.parametrize("name", ALONE)
def test_drafts_are_those_after_the_kept_positions_alone(name: str, tmp_path: Path) -> None:
    """As a drafter without a window drafts that has never been given the others, in rows of a batch."""
    drafter = ALONE[name](tmp_path)
    whole = [list(range(length)) for length in LENGTHS]
    plain, _ = drafted(drafter, whole)
    drafter.draft_window, drafter.draft_sink = WINDOW, SINK
    found, state = drafted(drafter, whole)
    dropped = state.dropped.tolist()
    assert dropped[0] > dropped[2] > dropped[1] == 0
    assert torch.equal(state.counted + state.dropped, torch.tensor(LENGTHS))
    drafter.draft_window = None
    for row, gone in enumerate(dropped):
        rows: list[list[int]] = [[0]] * row + [[*range(SINK), *range(SINK + gone, LENGTHS[row])]]
        rows += [[0]] * (len(LENGTHS) - len(rows))
        torch.testing.assert_close(found.logits[row], drafted(drafter, rows)[0].logits[row], rtol=1e-4, atol=1e-4)
        assert torch.allclose(found.logits[row], plain.logits[row], rtol=1e-2, atol=1e-2) == (gone == 0)


@torch.no_grad()
@pytest.mark.parametrize("name", [*ALONE, *DEEP])
def test_no_more_is_attended_to_and_no_later_position_is_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a window at least, however the text comes; what is kept does not grow with it."""
    drafter = {**ALONE, **DEEP}[name](tmp_path)
    drafter.draft_window, drafter.draft_sink = WINDOW, SINK
    features, tokens, _ = text(drafter, ENDS, 1)
    state = drafter.begin(1, 500)
    capacity = state.store.capacity
    highest, ends = [], []
    rotation = torch.Tensor.cos
    monkeypatch.setattr(torch.Tensor, "cos", lambda angles: highest.append(float(angles.max())) or rotation(angles))
    following = SlotCache.prepare
    monkeypatch.setattr(SlotCache, "prepare", lambda one, n: following(one, n) or ends.append(one.end))
    drafter.extend(state, features[:1, :40], tokens[:1, :40], torch.tensor([40]))
    for first in range(40, 61, 3):
        part = features[:1, first : first + 3], tokens[:1, first : first + 3], torch.tensor([3])
        drafter.propose(state, *part)
        assert WINDOW // 2 - drafter.draft_length <= int(state.counted) - SINK <= WINDOW
    assert int(state.counted + state.dropped) == 61
    assert state.store.capacity == capacity < 80
    assert max(highest) < SINK + WINDOW + drafter.draft_length  # angle of the first pair is the position
    assert max(ends, default=0) <= SINK + WINDOW


@torch.no_grad()
@pytest.mark.parametrize("name", [*ALONE, *DEEP])
def test_a_window_as_long_as_the_text_changes_no_draft(name: str, tmp_path: Path) -> None:
    drafter = {**ALONE, **DEEP}[name](tmp_path)
    rows = [list(range(length)) for length in LENGTHS]
    plain, _ = drafted(drafter, rows)
    drafter.draft_window = max(LENGTHS) + drafter.draft_length + LAST
    found, state = drafted(drafter, rows)
    assert torch.equal(found.logits, plain.logits)
    assert not state.dropped.any()


@torch.no_grad()
def test_a_state_goes_on_where_what_it_kept_still_fits() -> None:
    drafter = tiny_head(tiny_target("llama"), draft_window=WINDOW, draft_sink=SINK)
    _, state = drafted(drafter, [list(range(61))])
    gone = int(state.dropped)
    assert not state.cut(torch.tensor([62]))
    assert not state.cut(torch.tensor([gone + SINK - 1]))
    assert int(state.counted) == 61 - gone
    assert state.cut(torch.tensor([gone + SINK + 2]))
    assert state.counted.tolist() == [SINK + 2]


def test_settings_are_checked_saved_and_loaded(tmp_path: Path) -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    assert (head.draft_window, head.draft_sink) == (None, 4)
    with pytest.raises(ValueError, match=r"^draft_window is 23; give 24 or more, .* of 5 drafted tokens writes, or N"):
        head.draft_window = 23
    with pytest.raises(ValueError, match=r"^draft_sink is -1; give 0 or more\.$"):
        head.draft_sink = -1
    assert (head.draft_window, head.draft_sink) == (None, 4)
    head.draft_window, head.draft_sink = 32, 0
    head.save_pretrained(tmp_path)
    loaded = DartHead.from_pretrained(str(tmp_path), target=target)
    assert (loaded.draft_window, loaded.draft_sink) == (32, 0)
    loaded = DartHead.from_pretrained(str(tmp_path), target=target, draft_window=None, draft_sink=2)
    assert (loaded.draft_window, loaded.draft_sink) == (None, 2)
    with pytest.raises(ValueError, match="draft_window is 8;"):
        DartHead.from_pretrained(str(tmp_path), target=target, draft_window=8)


@pytest.mark.parametrize("positions", [64, None])
def test_published_drafters_have_the_window_that_their_files_say(positions: int | None, tmp_path: Path) -> None:
    target = tiny_target("llama", num_hidden_layers=8)
    config = eagle3_config(target, max_position_embeddings=positions)
    path = save(tmp_path / "eagle", config, eagle3_tensors(config))
    eagle = EagleDrafter.from_pretrained(path, target=target)
    assert (eagle.draft_window, eagle.draft_sink) == (positions, 4)
    dflash = dflash_drafter(tmp_path / "dflash", tiny_target("qwen3"), max_position_embeddings=128)
    assert dflash.draft_window == 128


def test_drafters_without_keys_of_their_own_have_no_window(tmp_path: Path) -> None:
    target = tiny_target("llama")
    with pytest.raises(ValueError, match=r"^A LanguageModelDrafter has no window of its own; leave draft_window out"):
        LanguageModelDrafter(nearly(target), target).draft_window = 64
    assistant = gemma4_drafter(tmp_path, attach(gemma4_target(vocab_size=VOCABULARY)))
    with pytest.raises(ValueError, match=r"^An assistant of Gemma 4 attends to its target's own text; leave"):
        assistant.draft_window = 64
