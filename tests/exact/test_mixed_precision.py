"""Float32 weights under autocast: drafted text is stock's under the same autocast, up to near-ties of its own logits.

Autocast is either around the call, or within the target's forward alone, where accelerate puts it for every trainer of
transformers and TRL with `bf16=True`: logits come out in float32 then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from support import tiny
from support.cases import GREEDY, SAMPLED, batch, replay
from support.compare import assert_identical_up_to_near_ties, tally
from support.families import needs_running_states
from support.tiny import tiny_eagle_drafter, tiny_head, tiny_target
from transformers import LlamaForCausalLM

from hf_dart import DartHead, LanguageModelDrafter, attach
from hf_dart.bench.exact import tolerance
from hf_dart.models.running_states.mixers import mixers_of
from hf_dart.models.trial import check_verification

NARROW = torch.bfloat16
UP_TO_NEAR_TIES = tally("float32 weights under bfloat16 autocast")
HYBRID = pytest.param("qwen3_5", 4, marks=needs_running_states)


def around(target: Any) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=NARROW)


def within(target: Any) -> AbstractContextManager[Any]:
    """As `Accelerator.prepare_model` does it."""
    narrow = torch.autocast("cpu", dtype=NARROW)(type(target).forward)
    target.forward = MethodType(convert_outputs_to_fp32(narrow), target)
    return nullcontext()


PLACES = pytest.mark.parametrize("place", [around, within])
Place = Callable[[Any], AbstractContextManager[Any]]


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize(("family", "size"), [("qwen3", 1), ("gemma3", 4), HYBRID])
@PLACES
def test_modes(place: Place, family: str, size: int) -> None:
    target, inputs = tiny_target(family, dtype=torch.float32), batch(size, "sdpa")
    attach(target)
    with place(target):
        for name, options in (("greedy", GREEDY), ("T=1", SAMPLED)):
            known = replay(target, inputs, misses=[0.1, 0.4, 0.3, 0.5][:size], **options)
            label = f"{place.__name__}, {family}, {name}, {size}"
            assert_identical_up_to_near_ties(target, known, inputs, into=UP_TO_NEAR_TIES, label=label, **options)
            assert known.last_stats.tau > 1.3


def language_model(target: Any) -> LanguageModelDrafter:
    return LanguageModelDrafter(tiny_target("qwen3", dtype=torch.float32, num_hidden_layers=1), target)


def selecting_head(target: Any) -> DartHead:
    return tiny_head(target).add_selector(4)


MAKERS = [tiny_head, selecting_head, tiny_eagle_drafter, tiny.tiny_diffusion_drafter, language_model]


@pytest.mark.parametrize("make", MAKERS)
@PLACES
def test_drafters(place: Place, make: Callable[[Any], Any]) -> None:
    target = tiny_target("qwen3", dtype=torch.float32)
    drafter = make(target)
    with place(target), place(drafter.model) if make is language_model else nullcontext():
        for size, mode in ((1, GREEDY), (4, SAMPLED if make is language_model else GREEDY)):
            label = f"{place.__name__}, {type(drafter).__name__}, {size}"
            inputs = batch(size, "sdpa")
            assert_identical_up_to_near_ties(target, drafter, inputs, into=UP_TO_NEAR_TIES, label=label, **mode)
            assert drafter.last_stats.tau > 1.1 or make is language_model


@PLACES
def test_log_probabilities(place: Place) -> None:
    """Of the tokens that both wrote, as rollouts keep them."""
    target, inputs = tiny_target("qwen3", dtype=torch.float32), batch(4, "sdpa")
    attach(target)
    with place(target):
        known = replay(target, inputs, misses=[0.0, 0.1, 0.0, 0.0], **SAMPLED)
        told = {**SAMPLED, "return_dict_in_generate": True, "output_logits": True}
        torch.manual_seed(0)
        stock = target.generate(**inputs, **told)
        torch.manual_seed(0)
        ours = target.generate(**inputs, **told, assistant=known)
    assert known.last_stats.tau > 1.3
    prompt, same = inputs["input_ids"].shape[1], torch.ones(4, dtype=torch.bool)
    for place_of_token, (theirs, made) in enumerate(zip(stock.logits, ours.logits, strict=True)):
        allowed = torch.tensor([tolerance(NARROW, float(row.max())) for row in theirs])
        tokens = stock.sequences[:, prompt + place_of_token]
        gap = (theirs.log_softmax(-1) - made.log_softmax(-1)).abs().gather(1, tokens[:, None])[:, 0]
        assert bool((gap <= allowed)[same].all()), (place_of_token, gap, allowed)
        same &= tokens == ours.sequences[:, prompt + place_of_token]
    assert bool(same.any())


class MasksLightly(LlamaForCausalLM):
    """Off by less than bfloat16 rounds where several tokens come after a cache, as those of trees do."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        outputs = super().forward(*args, attention_mask=attention_mask, **kwargs)
        if attention_mask is not None and attention_mask.ndim == 4:
            outputs.logits = outputs.logits * (1 + 2**-9)
        return outputs


@PLACES
def test_a_call_outside_autocast_is_tried_by_itself(place: Place) -> None:
    known = tiny_target("llama", dtype=torch.float32)
    target = MasksLightly(known.config).eval()
    target.load_state_dict(known.state_dict())
    with place(target):
        check_verification(target)
    vars(target).pop("forward", None)
    with pytest.raises(ValueError, match="something else for a token tree"):
        check_verification(target)


@needs_running_states
def test_running_states_go_through_a_tree_at_once() -> None:
    target = tiny_target("qwen3_5", dtype=torch.float32)
    with around(target):
        assert all(mixer.family is not None for mixer in mixers_of(target))
