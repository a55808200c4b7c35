"""Beginnings that prompts share: read twice at most, exact, and forgotten where the target changes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support import compare
from support.cases import SAMPLED
from support.tiny import prompts, tiny_eagle_drafter, tiny_head, tiny_target
from torch import Tensor
from transformers import DynamicCache

from hf_dart import Batcher, LookupDrafter
from hf_dart.models.stock_steps import CACHE
from hf_dart.serve import batcher as batcher_module
from hf_dart.serve import prefixes as prefixes_module

DRAFTERS = {"head": tiny_head, "eagle": tiny_eagle_drafter, "lookup": lambda _: LookupDrafter()}
DRAFTERS |= {"window": lambda target: tiny_head(target, draft_window=24)}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher_module, "PIECE", 16)
    monkeypatch.setattr(prefixes_module, "_LEAST", 8)


def with_system_prompt(count: int, seed: int = 0, length: int = 40) -> list[Tensor]:
    """Prompts that share their first tokens, and the next one with none."""
    system = prompts([length], seed=1000 + seed)["input_ids"]
    tails = [prompts([5 + number], seed=seed + number)["input_ids"] for number in range(count)]
    return [torch.cat([system, torch.tensor([[2 + number]]), tail], dim=1) for number, tail in enumerate(tails)]


def stock(target: Any, ids: Tensor, seed: int, **options: Any) -> Tensor:
    return compare.run(target, {"input_ids": ids}, seed, **SAMPLED, **options).sequences


def run(batcher: Batcher, ids: Tensor, seed: int, **options: Any) -> tuple[Tensor, Any, int]:
    """The text of a request that runs alone, its statistics, and the tokens of the prompt that the target read."""
    read: list[int] = []
    target, wrapped = batcher._model, type(batcher._model).prepare_inputs_for_generation

    def counted(*args: Any, **kwargs: Any) -> Any:
        inputs = wrapped(target, *args, **kwargs)
        read.append(inputs["input_ids"].shape[1])
        return inputs

    target.prepare_inputs_for_generation = counted
    try:
        handle = batcher.submit(ids, **SAMPLED, **options, seed=seed)
        text = handle.result()
    finally:
        del target.prepare_inputs_for_generation
    return text, handle.stats, sum(read) - 1  # the last one is stock's first step, which is not run


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "head"),
        ("gemma3", "eagle"),
        ("llama", "window"),
        *(
            pytest.param(family, kind, marks=pytest.mark.matrix)
            for family, kind in product(("llama", "gemma3", "gpt2", "mixtral"), DRAFTERS)
        ),
    ],
)
def test_texts_and_drafts_stay(kind: str, family: str) -> None:
    target = tiny_target(family)
    drafter = DRAFTERS[kind](target)
    batcher = Batcher(target, drafter, seats=2)
    for number, ids in enumerate(with_system_prompt(4 if kind == "window" else 5)):  # then it is halved elsewhere
        text, stats, read = run(batcher, ids, number)
        assert torch.equal(text, stock(target, ids, number, assistant=drafter))
        assert stats.committed == drafter.last_stats.committed  # its drafts too go on from what was read
        assert read == ids.shape[1] - (39 if number > 1 else 0)
    ids[0, 38] += 1  # one token that is not the same
    text, _, read = run(batcher, ids, 0)
    assert torch.equal(text, stock(target, ids, 0))
    assert read == ids.shape[1]
    batcher.close()


def test_a_bound_and_other_prompts() -> None:
    target = tiny_target("llama")
    batcher = Batcher(target, tiny_head(target), prefix_tokens=50)
    first, second = with_system_prompt(3, 0), with_system_prompt(3, 50)
    expected = [(first[0], 0), (first[1], 0), (first[2], 39), (second[0], 0), (second[1], 0), (second[2], 39)]
    for ids, spared in [*expected, (first[0], 0)]:  # the first beginning has made room
        text, _, read = run(batcher, ids, 3)
        assert torch.equal(text, stock(target, ids, 3))
        assert read == ids.shape[1] - spared
    (kept,) = batcher._prefixes._kept
    assert kept.features.untyped_storage().nbytes() == kept.features.nbytes, "of one position, not of its whole piece"
    none = Batcher(target, tiny_head(target), prefix_tokens=0)
    assert [run(none, ids, 3)[2] for ids in first] == [ids.shape[1] for ids in first]


def test_the_beginning_that_was_used_last_is_kept() -> None:
    """Not the one that was read last."""
    target = tiny_target("llama")
    a, b, c = (with_system_prompt(3, seed) for seed in (0, 50, 90))
    with Batcher(target, tiny_head(target), prefix_tokens=80) as batcher:
        spared = [len(ids[0]) - run(batcher, ids, 3)[2] for ids in (*a[:2], *b[:2], a[2], *c[:2], a[0])]
    assert spared == [0, 0, 0, 0, 39, 0, 0, 39]


def test_a_request_with_another_drafter() -> None:
    """It has not read what the batcher's own drafter has, and begins at the beginning."""
    target = tiny_target("llama")
    batcher, other = Batcher(target, tiny_head(target)), tiny_head(target, num_layers=2, feature_layers=[1])
    for number, ids in enumerate(with_system_prompt(4)):
        text, _, read = run(batcher, ids, number, **({"assistant": other} if number == 2 else {}))
        assert torch.equal(text, stock(target, ids, number))
        assert read == ids.shape[1] - (39 if number == 3 else 0)
    batcher.close()


@pytest.mark.parametrize("shifts", [(9, 9, 0), (0, 0, 9)])
def test_requests_with_positions_of_their_own(shifts: tuple[int, ...]) -> None:
    """Keys are turned by them: such a request neither leaves a beginning nor takes one."""
    target = tiny_target("llama")
    with Batcher(target) as batcher:
        for number, (ids, shift) in enumerate(zip(with_system_prompt(3), shifts, strict=True)):
            own = {"position_ids": torch.arange(shift, shift + ids.shape[1])[None]} if shift else {}
            text, _, read = run(batcher, ids, number, **own)
            assert torch.equal(text, stock(target, ids, number, **own))
            assert read == ids.shape[1]


def test_static_caches() -> None:
    """Copies of their layers would share what is written in place: no beginning is kept."""
    target = tiny_target("llama")
    with Batcher(target) as batcher:
        for number, ids in enumerate(with_system_prompt(3)):
            text, _, read = run(batcher, ids, number, cache_implementation="static")
            assert torch.equal(text, stock(target, ids, number, cache_implementation="static"))
            assert read == ids.shape[1]


def test_adapters_that_are_switched() -> None:
    """What one of them has read is not what another one reads: no beginning is kept."""
    target = tiny_target("llama")
    for name in ("default", "other"):
        target.add_adapter(LoraConfig(init_lora_weights=False, target_modules=["q_proj", "v_proj"]), name)
    with Batcher(target) as batcher:
        for number, ids in enumerate(with_system_prompt(4)):
            target.set_adapter("other" if number == 3 else "default")
            text, _, read = run(batcher, ids, number)
            assert torch.equal(text, stock(target, ids, number))
            assert read == ids.shape[1]


def test_a_cache_that_is_passed_in() -> None:
    """It is filled, although the prompt's beginning is kept; once it is, no request that came before reads on in it."""
    target = tiny_target("llama")
    with Batcher(target) as batcher:
        for number, ids in enumerate(with_system_prompt(3)):
            cache = DynamicCache(config=target.config)
            with batcher._changed:  # neither is begun before both are asked for
                handles = [batcher.submit(ids, **SAMPLED, **{CACHE: cache}, seed=number) for _ in range(2)]
            text = stock(target, ids, number)
            assert torch.equal(handles[0].result(), text)
            with pytest.raises(ValueError, match="Another call has filled this cache"):
                handles[1].result()
            assert cache.get_seq_length() == text.shape[1] - 1
            batcher.submit(ids, **SAMPLED).result()


def test_prompts_that_are_read_whole() -> None:
    """Embeddings and padding, which may differ where ids do not, and what needs other rotary frequencies."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3, 4, 5]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 30, **factors}
    target, moving = tiny_target("llama"), tiny_target("llama", rope_parameters=rope)
    phi = tiny_target("phi3_full", original_max_position_embeddings=40)  # drops caches of fewer positions there
    ids = with_system_prompt(3)
    embeddings, mask = target.get_input_embeddings()(ids[0]).detach(), torch.ones_like(ids[2])
    mask[:, :20] = 0
    asked: list[tuple[Any, dict[str, Tensor], int]] = [(target, {"input_ids": one}, 9) for one in ids]
    asked += [(target, {"input_ids": ids[0], "inputs_embeds": embeddings * factor}, 9) for factor in (0.1, -1.0)]
    asked += [(target, {"input_ids": ids[2], "attention_mask": mask}, 9)]
    asked += [(moving, {"input_ids": ids[0]}, 1)]  # no more tokens, as no seat takes it
    asked += [(phi, {"input_ids": one}, 9) for one in ids]
    with Batcher(target) as one, Batcher(moving) as other, Batcher(phi) as third:
        batchers = {target: one, moving: other, phi: third}
        for number, (model, inputs, most) in enumerate(asked):
            options = {"do_sample": True, "top_k": 0, "max_new_tokens": most}
            wanted = compare.run(model, inputs, number, **options)
            handle = batchers[model].submit(**inputs, **options, seed=number)
            assert torch.equal(handle.result(), wanted.sequences)


@pytest.mark.parametrize("change", [
    lambda model: model.layers[0].mlp.down_proj.weight.data.mul_(2.0),  # which no version counts
    lambda model: model.layers[0].register_forward_hook(lambda layer, given, output: output.flip(-1)),
    lambda model: model.rotary_emb.inv_freq.mul_(0.5),
], ids=["weights", "a hook", "a buffer"])  # fmt: skip
def test_a_target_that_changes(change: Callable[[Any], Any]) -> None:
    target = tiny_target("llama")
    batcher = Batcher(target)
    for number, ids in enumerate(with_system_prompt(4)):
        if number == 3:
            change(target.model)
        text, _, read = run(batcher, ids, number)
        assert torch.equal(text, stock(target, ids, number))
        if number < 3:  # a hook has the target tried again, which reads more
            assert read == ids.shape[1] - (39 if number == 2 else 0)
