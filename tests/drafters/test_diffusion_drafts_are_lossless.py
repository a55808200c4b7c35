"""The contract with the diffusion drafter: that of `test_exact.py`, and with `-m matrix` all the other matrices.

In float64 without tolerance. The matrices are those of the files they are named after, with this drafter for the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_interruption
import test_options
import test_refusals
import test_turns
import torch
from support import matrix
from support.cases import GREEDY, MODES, SAMPLED, batch
from support.compare import assert_identical, tally
from support.tiny import prompts, tiny_diffusion_drafter, tiny_target
from test_exact import FAMILIES
from test_options import clock
from transformers import DynamicCache

from hf_dart import DiffusionDrafter, TreeConfig
from hf_dart.decoding.candidate_generator import DartCandidateGenerator

__all__ = ["clock"]  # a fixture
EXACT = tally("float64, diffusion drafters")


@pytest.fixture(scope="module")
def llama() -> tuple[Any, DiffusionDrafter]:
    target = tiny_target("llama")
    return target, tiny_diffusion_drafter(target)


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str) -> None:
    compare_with_stock("gemma3", "sdpa", [mode])


@pytest.mark.matrix
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, attention: str) -> None:
    compare_with_stock(family, attention, list(MODES))


def compare_with_stock(family: str, attention: str, modes: list[str]) -> None:
    target = tiny_target(family, attention)
    drafter = tiny_diffusion_drafter(target, feature_layers=[1])
    for size in (1, 4):
        for mode in modes:
            assert_identical(target, drafter, batch(size, attention), max_new_tokens=24, into=EXACT, **MODES[mode])


@pytest.mark.parametrize(("steps", "unmasking"), [(1, "confidence"), (2, "left_to_right"), (5, "confidence")])
def test_every_number_of_steps(llama: tuple[Any, DiffusionDrafter], steps: int, unmasking: str) -> None:
    target, _ = llama
    drafter = tiny_diffusion_drafter(target, denoise_steps=steps, unmasking=unmasking, share_embeddings=False)
    for size, tree in ((1, TreeConfig(nodes=20, depth=3)), (4, TreeConfig.chain(5))):
        for mode in (GREEDY, SAMPLED):
            assert_identical(target, drafter, batch(size, "sdpa"), **mode, tree_config=tree, into=EXACT)


@pytest.mark.parametrize("mode", ["greedy", "eos"])
def test_several_turns(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_turns, "tiny_head", tiny_diffusion_drafter)
    test_turns.assert_turns_are_stocks("gemma3", "dynamic", test_turns.RAGGED, mode)


@pytest.mark.parametrize("lengths", [[7], test_turns.RAGGED])
def test_the_next_turn_drafts_as_if_it_had_read_all(
    llama: tuple[Any, DiffusionDrafter], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[bool] = []
    resume_state = test_turns.turns.resume_state

    def watched(*args: Any) -> Any:
        answers.append((draft := resume_state(*args)) is not None)
        return draft

    monkeypatch.setattr(test_turns.prefill, "resume_state", watched)
    test_turns.test_the_next_turn_drafts_as_if_it_had_read_all(llama, "dynamic", lengths, "sampled", answers)


def test_interrupted_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_interruption, "tiny_head", tiny_diffusion_drafter)
    reached = test_interruption.interrupt("gemma3", "dynamic", test_interruption.RAGGED, True, cases=4, seed=1)
    assert len(set(reached)) > 2


def test_chunks_and_hidden_states(llama: tuple[Any, DiffusionDrafter]) -> None:
    target, drafter = llama
    asked = {"return_dict_in_generate": True, "output_hidden_states": True}
    for options in ({"prefill_chunk_size": 4}, asked):
        assert_identical(target, drafter, prompts([9, 3, 7, 13]), **SAMPLED, **options)


@pytest.mark.parametrize("route", test_refusals.ROUTES)
@pytest.mark.parametrize("name", ["beams", "no cache", "offloaded", "attentions", "right padding", "an empty prompt"])
def test_refused_options(llama: tuple[Any, DiffusionDrafter], route: str, name: str) -> None:
    """As for a head; the next call is as exact as ever."""
    target, drafter = llama
    test_refusals.test_refused_options(target, drafter, test_refusals.ROUTES[route](drafter), name)  # type: ignore[arg-type]


def test_steps_and_order_may_change_between_turns(llama: tuple[Any, DiffusionDrafter]) -> None:
    """What one turn leaves to the next knows nothing of them."""
    target, _ = llama
    drafter = tiny_diffusion_drafter(target)
    for mode in (GREEDY, SAMPLED):
        past, text = DynamicCache(), prompts([9, 3])
        for steps, unmasking in ((1, "confidence"), (4, "left_to_right"), (2, "confidence")):
            drafter.denoise_steps, drafter.unmasking = steps, unmasking
            torch.manual_seed(steps)
            stock = target.generate(**text, **mode)
            torch.manual_seed(steps)
            ours = target.generate(**text, **mode, assistant=drafter, past_key_values=past)
            assert torch.equal(ours, stock)
            ids = torch.cat([stock, torch.full((2, 2), 5)], dim=1)
            mask = torch.ones_like(ids)
            mask[:, : text["attention_mask"].shape[1]] = text["attention_mask"]
            text = {"input_ids": ids, "attention_mask": mask}


def test_stocks_assisted_loop(llama: tuple[Any, DiffusionDrafter]) -> None:
    target, drafter = llama
    inputs = prompts([7])
    ours = target.generate(**inputs, **GREEDY, custom_generate=DartCandidateGenerator.stock_loop(drafter))
    assert ours.tolist() == target.generate(**inputs, **GREEDY).tolist()


# ---- the matrices of other files --------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "kind", "lengths", "mode"), test_turns.CASES)
def test_turns_of_every_cache_kind(
    family: str, kind: str, lengths: list[int], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_turns, "tiny_head", tiny_diffusion_drafter)
    test_turns.assert_turns_are_stocks(family, kind, lengths, mode)


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "column"), matrix.CELLS, ids=str)
def test_cells(family: str, column: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "tiny_head", tiny_diffusion_drafter)
    assert matrix.run_cell(family, column).total.mean_tau > 1.3


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:Passing `")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("family", test_options.FAMILIES)
def test_options_in_pairs_everywhere(
    family: str, seed: int, clock: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_options, "tiny_head", tiny_diffusion_drafter)
    test_options.test_options_in_pairs_everywhere(family, seed, clock)


@pytest.mark.matrix
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("lengths", [[7], test_interruption.RAGGED])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_interrupted_anywhere_often(
    family: str, lengths: list[int], sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_interruption, "tiny_head", tiny_diffusion_drafter)
    test_interruption.interrupt(family, "dynamic", lengths, sampled, cases=40, seed=2)


def test_the_runs_accepted_drafts() -> None:
    if not EXACT.taus:
        pytest.skip("none of the runs that this test adds up was selected")
    assert EXACT.mean_tau > 1.3
