"""What every kind of drafter promises: stock's text in whatever call, files that load again, its own target alone.

In float64 without tolerance. What a kind drafts is compared with a reference in a file of its own.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.assistants import gemma4_target
from support.cases import FAMILIES, GREEDY, MODES, SAMPLED, batch
from support.compare import Tally, assert_identical, run, tally
from support.heads import assert_saved
from support.interruptions import interrupt
from support.makers import MAKERS, PARTS, PUBLISHED, pair
from support.sentences import refused
from support.tiny import prompts, tiny_diffusion_drafter, tiny_target
from support.turns import RAGGED, assert_drafts_as_if_it_had_read_all, assert_turns_are_stocks

from hf_dart import DartCandidateGenerator, TreeConfig, attach, load_drafter

SAVED = ["dart", "eagle", "diffusion", "dflash", "gemma4"]
OF_ANY_TARGET = [kind for kind in MAKERS if kind not in ("mtp", "gemma4")]
IN_FAMILIES = [
    *((kind, family, attention) for kind in OF_ANY_TARGET for family in FAMILIES for attention in ("eager", "sdpa")),
    *(("dflash", family, "sdpa") for family in ("opt", "cohere2")),
]
TALLIES: dict[str, Tally] = {kind: tally(f"float64, {kind}", least=1.2) for kind in [*MAKERS, *PUBLISHED]}
TREES = [  # with the number of rows, and of branches where a drafter has some
    (4, TreeConfig.chain(5), 1, "called"), (1, TreeConfig(nodes=20, depth=3), 3, "called"),
    (1, TreeConfig(nodes=4, depth=1), 50, "called"), (2, TreeConfig(), 4, "called"),
    (4, TreeConfig.chain(5), 1, "captured"), (2, TreeConfig(), 4, "captured"),
]  # fmt: skip


@pytest.fixture(scope="module")
def pairs() -> Callable[[str], tuple[Any, Any]]:
    """A target, and the drafter of a kind for it."""
    return cache(pair)


# ---- the text is stock's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", OF_ANY_TARGET)
def test_modes(kind: str, mode: str) -> None:
    compare_with_stock("gemma3", "sdpa", kind, [mode])


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "family", "attention"), IN_FAMILIES)
def test_families(kind: str, family: str, attention: str) -> None:
    compare_with_stock(family, attention, kind, list(MODES))


def compare_with_stock(family: str, attention: str, kind: str, modes: list[str]) -> None:
    target = tiny_target(family, attention)
    drafter = MAKERS[kind](target)
    for size in (1, 4):
        for mode in modes:
            options = {**MODES[mode], "max_new_tokens": 24, "tree_config": TreeConfig(nodes=20)}
            assert_identical(target, drafter, batch(size, attention), into=TALLIES[kind], **options)


@pytest.mark.parametrize(("size", "tree", "beam", "executor"), TREES, indirect=["executor"])
@pytest.mark.parametrize("kind", [*MAKERS, *PUBLISHED])
def test_trees(
    pairs: Any, kind: str, size: int, tree: TreeConfig, beam: int, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs(kind)[1], "beam", beam, raising=False)
    into = TALLIES[kind] if executor == "called" else None  # either accepts the same drafts
    for mode in (GREEDY, SAMPLED):
        assert_identical(*pairs(kind), batch(size, "sdpa"), **mode, tree_config=tree, into=into)
    if executor == "captured":
        assert pairs(kind)[1].engine.calls >= 2, "it ran uncompiled"


@pytest.mark.parametrize(("family", "cache", "mode"), [("gemma3", "dynamic", "greedy"), ("llama", "static", "eos")])
@pytest.mark.parametrize("kind", OF_ANY_TARGET)
def test_turns(kind: str, family: str, cache: str, mode: str) -> None:
    assert_turns_are_stocks(family, cache, RAGGED, mode, MAKERS[kind])


@pytest.mark.parametrize("lengths", [[7], RAGGED])
@pytest.mark.parametrize("kind", ["diffusion", "dflash"])  # heads in decoding/test_turns.py; others round to float32
def test_the_next_turn_drafts_as_if_it_had_read_all(
    pairs: Any, kind: str, lengths: list[int], taken_up: list[bool]
) -> None:
    assert_drafts_as_if_it_had_read_all(*pairs(kind), "dynamic", lengths, "sampled", taken_up)


def test_interrupted_anywhere() -> None:
    reached = interrupt("gemma3", "dynamic", RAGGED, True, cases=4, seed=1, make=tiny_diffusion_drafter)
    assert len(set(reached)) > 2


@pytest.mark.parametrize("kind", MAKERS)
def test_odd_prompts(pairs: Any, kind: str) -> None:
    """Chunks, hidden states that the user asks for, and prompts of embeddings."""
    target, drafter = pairs(kind)
    inputs = prompts([9, 3, 7, 13])
    asked = {"return_dict_in_generate": True, "output_hidden_states": True}
    for options in ({"prefill_chunk_size": 4}, asked):
        assert_identical(target, drafter, inputs, **SAMPLED, **options)
    embeddings = target.get_input_embeddings()(inputs["input_ids"]).detach()
    assert_identical(target, drafter, {**inputs, "inputs_embeds": embeddings, "input_ids": None}, **GREEDY)


@pytest.mark.parametrize("kind", [*MAKERS, "some tokens"])
def test_stocks_assisted_loop(pairs: Any, kind: str) -> None:
    target, drafter = pairs(kind)
    loop = DartCandidateGenerator.stock_loop(drafter)
    ours = run(target, prompts([7]), 0, **GREEDY, custom_generate=loop).sequences
    assert torch.equal(ours, run(target, prompts([7]), 0, **GREEDY).sequences)


# ---- files and targets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*SAVED, *PARTS])
def test_save_and_load(pairs: Any, tmp_path: Path, kind: str) -> None:
    target, drafter = pairs(kind)
    loaded, runs = assert_saved(drafter, target, tmp_path), []
    for each in (drafter, loaded):
        assert_identical(target, each, prompts([7, 4]), **SAMPLED, tree_config=TreeConfig(nodes=8))
        runs.append(each.last_stats.to_dict() | {"seconds": None})
    assert runs[0] == runs[1]


OTHERS = [({"hidden_size": 64}, "hidden size"), ({"num_hidden_layers": 3}, "layers"), ({"vocab_size": 64}, "64")]


@pytest.mark.parametrize(
    ("kind", "changed", "word"),
    [(kind, *other) for kind in ("dart", "eagle") for other in OTHERS] + [("diffusion", *OTHERS[-1])],
)
def test_another_target_is_refused(pairs: Any, tmp_path: Path, kind: str, changed: dict[str, int], word: str) -> None:
    """A diffusion drafter reads no hidden states: any target of its vocabulary will do."""
    target, drafter = pairs(kind)
    drafter.save_pretrained(tmp_path)
    other = tiny_target("llama", **changed)
    refused(lambda: load_drafter(str(tmp_path), target=other), ValueError, word)
    own = MAKERS[kind](other)
    refused(lambda: attach(target).generate(**prompts([7]), **GREEDY, assistant=own), ValueError, word)
    # Both are as good as before.
    assert_identical(other, own, prompts([7]), **GREEDY)
    assert_identical(target, load_drafter(str(tmp_path), target=target), prompts([7]), **GREEDY)


@pytest.mark.parametrize("kind", SAVED)
def test_copies_draft_for_the_same_target(pairs: Any, kind: str) -> None:
    target, drafter = pairs(kind)
    other = copy.deepcopy(drafter)
    assert other.shared is drafter.shared
    weights = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    assert_identical(target, other, prompts([9, 3]), **GREEDY, tree_config=TreeConfig(nodes=8))
    again = copy.deepcopy(target)
    assert_identical(attach(again), other.bind(again), prompts([9, 3]), **GREEDY, tree_config=TreeConfig(nodes=8))
    assert all(torch.equal(weights[name], tensor) for name, tensor in drafter.state_dict().items())


@pytest.mark.parametrize("kind", SAVED)
def test_pickles_hold_no_target(kind: str) -> None:
    """They are bound again."""
    target = gemma4_target(vocab_size=48) if kind == "gemma4" else tiny_target("qwen3")
    drafter = MAKERS[kind](target)
    stored = pickle.dumps(drafter)
    assert len(stored) < len(pickle.dumps(target)) + len(pickle.dumps(drafter.state_dict()))
    again = pickle.loads(stored)
    with pytest.raises(ValueError, match=r"has no target: .* call its bind\(model\)"):
        attach(target).generate(**prompts([7]), **GREEDY, assistant=again)
    assert_identical(target, again.bind(target), prompts([7]), **GREEDY)
    assert_identical(target, drafter, prompts([7]), **GREEDY)


@pytest.mark.parametrize("kind", ["language model", "mtp"])
def test_copies_and_pickles_of_modules_of_transformers(kind: str) -> None:
    """They hold no target."""
    target, drafter = pair(kind)
    memo = dict[int, Any]()
    for again in (copy.deepcopy(drafter, memo), pickle.loads(pickle.dumps(drafter))):
        assert_identical(target, again, prompts([7]), **GREEDY, into=TALLIES[kind])
    assert id(target) not in memo


@pytest.mark.parametrize(("kind", "name"), [("language model", "model"), ("mtp", "module")])
def test_modules_of_transformers_that_are_moved(kind: str, name: str) -> None:
    _, drafter = pair(kind)
    for device in ("cpu", "meta"):
        getattr(drafter, name).to(device)
        assert drafter.runs_in[0].type == device
