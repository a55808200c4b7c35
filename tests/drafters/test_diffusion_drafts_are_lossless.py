"""The contract with the diffusion drafter: that of heads, and with `-m matrix` all the matrices that heads have.

In float64 without tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import FAMILIES, GREEDY, MODES, SAMPLED, batch
from support.compare import assert_identical, tally
from support.interruptions import interrupt
from support.options import FAMILIES as OPTIONS_FAMILIES
from support.options import assert_pairs_are_stocks
from support.options import clock as clock
from support.refusals import ROUTES, assert_refused_option
from support.tiny import prompts, tiny_diffusion_drafter, tiny_target
from support.turns import CASES, RAGGED, assert_drafts_as_if_it_had_read_all, assert_turns_are_stocks
from support.turns import taken_up as taken_up
from surveys import matrix
from transformers import DynamicCache

from hf_dart import DiffusionDrafter, TreeConfig
from hf_dart.decoding.candidate_generator import DartCandidateGenerator

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
def test_several_turns(mode: str) -> None:
    assert_turns_are_stocks("gemma3", "dynamic", RAGGED, mode, tiny_diffusion_drafter)


@pytest.mark.parametrize("lengths", [[7], RAGGED])
def test_the_next_turn_drafts_as_if_it_had_read_all(
    llama: tuple[Any, DiffusionDrafter], lengths: list[int], taken_up: list[bool]
) -> None:
    assert_drafts_as_if_it_had_read_all(*llama, "dynamic", lengths, "sampled", taken_up)


def test_interrupted_anywhere() -> None:
    reached = interrupt("gemma3", "dynamic", RAGGED, True, cases=4, seed=1, make=tiny_diffusion_drafter)
    assert len(set(reached)) > 2


def test_chunks_and_hidden_states(llama: tuple[Any, DiffusionDrafter]) -> None:
    target, drafter = llama
    asked = {"return_dict_in_generate": True, "output_hidden_states": True}
    for options in ({"prefill_chunk_size": 4}, asked):
        assert_identical(target, drafter, prompts([9, 3, 7, 13]), **SAMPLED, **options)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["beams", "no cache", "offloaded", "attentions", "right padding", "an empty prompt"])
def test_refused_options(llama: tuple[Any, DiffusionDrafter], route: str, name: str) -> None:
    target, drafter = llama
    assert_refused_option(target, drafter, ROUTES[route](drafter), name)


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


# ---- the matrices ------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "kind", "lengths", "mode"), CASES)
def test_turns_of_every_cache_kind(family: str, kind: str, lengths: list[int], mode: str) -> None:
    assert_turns_are_stocks(family, kind, lengths, mode, tiny_diffusion_drafter)


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "column"), matrix.CELLS, ids=str)
def test_cells(family: str, column: Any) -> None:
    assert matrix.run_cell(family, column, make=tiny_diffusion_drafter).total.mean_tau > 1.3


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:Passing `")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("family", OPTIONS_FAMILIES)
def test_options_in_pairs_everywhere(family: str, seed: int, clock: Callable[[], None]) -> None:
    assert_pairs_are_stocks(family, seed, clock, EXACT, tiny_diffusion_drafter)


@pytest.mark.matrix
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("lengths", [[7], RAGGED])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_interrupted_anywhere_often(family: str, lengths: list[int], sampled: bool) -> None:
    interrupt(family, "dynamic", lengths, sampled, cases=40, seed=2, make=tiny_diffusion_drafter)


def test_the_runs_accepted_drafts() -> None:
    if not EXACT.taus:
        pytest.skip("none of the runs that this test adds up was selected")
    assert EXACT.mean_tau > 1.3
