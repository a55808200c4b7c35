"""Copies of earlier text and the bigram selector: what they put forward, and that they change no token."""

from __future__ import annotations

import functools
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.compare import assert_identical, run
from support.tiny import prompts, tiny_head, tiny_target

from hf_dart import DartHead, LookupDrafter, TreeConfig, attach
from hf_dart.lookup import Graft, RowLookup
from hf_dart.trees.scoring import BeamScores, PathScores
from hf_dart.trees.tree import Beam, grow_tree

GREEDY = {"do_sample": False, "max_new_tokens": 40}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 24}


def continuation(text: list[int], length: int) -> list[int] | None:
    """What follows the longest earlier match of the end of the text, the latest of several; None if none."""
    best, best_end = 1, 0
    for end in range(2, len(text)):
        matched = 0
        while matched < end and text[end - 1 - matched] == text[-1 - matched]:
            matched += 1
        if matched >= max(best, 2) and (matched > best or end > best_end):
            best, best_end = matched, end
    if not best_end:
        return None
    copied: list[int] = []
    for offset in range(length):
        copied.append([*text, *copied][best_end + offset])
    return copied


@pytest.mark.parametrize("seed", range(10))
def test_finds_the_longest_match(seed: int) -> None:
    """Texts short enough that no occurrence is passed over."""
    random = Random(seed)
    text = [random.randrange(4) for _ in range(3)]
    lookup = RowLookup(text)
    found = 0
    for _ in range(20):
        copied, chance = lookup.suggest(3)
        wanted = continuation(text, 3)
        if wanted is None:
            assert copied == []
        else:
            found += 1
            assert -inf < chance < 0
            assert copied == wanted[: len(copied)]
            assert copied, "a copy is put forward"
        text += [random.randrange(4) for _ in range(random.choice([1, 1, 2]))]
    assert found > 5


def test_a_loop_goes_on() -> None:
    text = [5, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    copied, _ = RowLookup(text).suggest(8)
    assert copied == [1, 2, 3, 1, 2, 3, 1, 2][: len(copied)]
    assert len(copied) > 3


def test_learns_how_often_copies_are_right() -> None:
    chances = {}
    for right in (True, False):
        text = [1, 2, 3, 1, 2]
        lookup = RowLookup(text)
        random = Random(0)
        for _ in range(12):
            copied, _ = lookup.suggest(4)
            text += copied[:2] if right else [9 + random.randrange(3)]
            text += [1, 2]
        chances[right] = lookup.suggest(4)[1]
    assert chances[True] > chances[False]


def test_a_copy_grows_into_the_tree() -> None:
    """Row 0 copies five tokens, three deeper than the drafter goes; row 1 has nothing to copy."""
    rows = [RowLookup([7, 8, 11, 12, 13, 14, 15, 16, 7, 8]), RowLookup([1, 2, 3, 4])]
    copies = [row.suggest(5) for row in rows]
    graft = Graft.of(copies, torch.device("cpu"))
    assert graft is not None
    candidates = torch.tensor([[[1, 2], [3, 4]], [[1, 2], [3, 4]]])
    scores = torch.tensor([[[-3.0, -4.0]] * 2] * 2)
    wide, wide_scores = graft.extend(candidates, scores)
    copied, log_chance = copies[0]
    depth = len(copied)
    assert wide.shape == (2, max(2, depth), 3)
    assert torch.equal(wide[:, :2, :2], candidates)
    scorer = BeamScores(PathScores(TreeConfig(), None), 2, None, graft)
    tree = grow_tree(torch.tensor([[8], [4]]), wide, wide_scores, nodes=depth + 4, beam=4, scorer=scorer)
    paths = []
    for row in range(2):
        deepest = int(tree.depths[row].argmax())
        path = tree.tokens[row][tree.ancestors[row, deepest]].tolist()
        paths.append(path[1:])
        real = tree.parents[row] >= 0
        assert (tree.tokens[row][real] >= 0).all(), "a place without a candidate became a node"
    assert paths[0] == copied
    assert len(paths[1]) <= 2
    raised = scorer(Beam(torch.tensor([[8], [4]]), wide, [], []), wide_scores[:, 0])
    assert float(raised[0].max()) == pytest.approx(log_chance, rel=1e-4)
    assert float(raised[1, :, 2].max()) == -inf


def test_nothing_to_copy() -> None:
    assert Graft.of([RowLookup(text).suggest(5) for text in ([1, 2, 3], [4])], torch.device("cpu")) is None


@pytest.mark.parametrize("size", [1, 4])
def test_looping_text_is_copied(size: int) -> None:
    """A target whose text loops accepts copies that a random head does not find."""
    target = tiny_target("gemma3")  # its greedy text does
    head = tiny_head(target)
    inputs = prompts([11] * size)
    taus = []
    for lookup in (0, 24):
        assert_identical(target, head, inputs, **GREEDY, tree_config=TreeConfig(nodes=8, lookup=lookup))
        assert head.last_stats is not None
        taus.append(head.last_stats.tau)
    assert taus[1] > taus[0] + 0.1


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("size", [1, 4])
def test_no_head_at_all(size: int, options: dict[str, Any]) -> None:
    target = attach(tiny_target("gemma3"))
    drafter = LookupDrafter(TreeConfig(nodes=8))
    inputs = prompts([11, 3, 7, 12][:size])
    assert_identical(target, drafter, inputs, **{**options, "max_new_tokens": 60})
    assert drafter.last_stats is not None
    assert drafter.last_stats.drafted > 0
    assert drafter.last_stats.accepted > 0 or options["do_sample"], "greedy text loops here"
    assert_identical(target, LookupDrafter(), inputs, **options)


def test_no_head_asks_for_no_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    target = attach(tiny_target("llama"))
    drafter = LookupDrafter()
    asked: list[Any] = []
    plain = type(target).forward

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.get("output_hidden_states"))
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(type(target), "forward", forward)
    target.generate(**prompts([7]), **GREEDY, assistant=drafter)
    assert len(asked) > 1
    assert not any(asked)


# ---- the selector -----------------------------------------------------------------------------------------


def test_an_untrained_selector_changes_no_draft() -> None:
    target = tiny_target("qwen3")
    head = tiny_head(target)
    for inputs in (prompts([7]), prompts([9, 3, 7, 12])):
        counts = []
        for rank in (0, 4):
            if rank:
                head.add_selector(rank)
                torch.nn.init.zeros_(head.selector.context.weight)
            run(target, inputs, 0, assistant=head, **SAMPLED)
            counts.append(head.last_stats.to_dict() | {"seconds": None})
            head.selector = None
        assert counts[0] == counts[1]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_selector_changes_no_token(size: int, options: dict[str, object], tmp_path: Path) -> None:
    target = tiny_target("qwen3")
    before = torch.get_rng_state()
    head = tiny_head(target).add_selector(4)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        for weight in head.selector.parameters():
            weight.add_(0.5 * torch.randn(weight.shape, dtype=weight.dtype))
    inputs = prompts([7] if size == 1 else [9, 3, 7, 12])
    for lookup in (0, 24):
        assert_identical(target, head, inputs, **options, tree_config=TreeConfig(nodes=8, lookup=lookup))
    drafted = head.last_stats.to_dict() | {"seconds": None}

    head.save_pretrained(tmp_path)
    loaded = DartHead.from_pretrained(str(tmp_path), target=target)
    assert_identical(target, loaded, inputs, **options, tree_config=TreeConfig(nodes=8, lookup=24))
    assert loaded.last_stats.to_dict() | {"seconds": None} == drafted


@torch.no_grad()
def test_tables_of_the_vocabulary_are_the_pairs() -> None:
    """What is made once for all tokens equals the selector's own pass, also after its weights change."""
    target = tiny_target("qwen3")
    head = tiny_head(target).add_selector(4)
    embeddings = target.get_input_embeddings()
    hidden = torch.randn(2, 3, head.config.hidden_size, dtype=torch.float64)
    previous, candidates = torch.randint(48, (2, 3, 5)), torch.randint(48, (2, 3, 6))
    logits = torch.randn(2, 3, 6, dtype=torch.float64)
    for _ in range(2):
        fast = head.selector.lookup(hidden, logits, embeddings, previous, candidates)
        plain = head.selector(hidden, logits, embeddings.weight, previous, candidates)
        assert fast.shape == (2, 3, 5, 6)
        torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)
        for weight in head.selector.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, dtype=weight.dtype))


def test_copies_that_do_not_pay_pause_nothing() -> None:
    """Without a drafter there is nothing to pause, and no training to have gone wrong."""
    target = attach(tiny_target("llama"))
    drafter = LookupDrafter(TreeConfig(node_cost=0.2))
    options = {"do_sample": True, "top_k": 0, "temperature": 3.0, "max_new_tokens": 80}
    assert_identical(target, drafter, prompts([30]), **options)
    stats = drafter.last_stats
    assert stats.rounds > 40
    assert (stats.chain_rounds, stats.paused_rounds, drafter.told) == (0, 0, False)
