"""A drafter for calls that name none: `attach(model, drafter)`, for whatever calls `generate` itself."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.compare import run
from support.tiny import prompts, tiny_head, tiny_target
from support.users import TOKENIZER
from transformers import pipeline
from transformers.generation.streamers import BaseStreamer

from hf_dart import DartHead, LookupDrafter, attach, detach, load_drafter

INPUTS = prompts([7, 4])
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 16}
BEAMS = {"num_beams": 2, "do_sample": False, "max_new_tokens": 8}


class Record(BaseStreamer):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.shown.append(value.tolist())

    def end(self) -> None:
        self.shown.append([])


@pytest.fixture
def target() -> Any:
    return tiny_target("qwen3")


@pytest.fixture
def head(target: Any) -> DartHead:
    return tiny_head(target)


def drafted(head: DartHead) -> bool:
    """Has the head drafted since it was last asked?"""
    stats, head.last_stats = head.last_stats, None
    return stats is not None and stats.accepted > 0


@pytest.mark.parametrize("options", [SAMPLED, {"do_sample": False, "max_new_tokens": 16}])
def test_every_call_drafts(target: Any, head: DartHead, options: dict[str, Any]) -> None:
    stock = run(target, INPUTS, 0, **options)
    assert attach(target, head) is target
    ours = run(target, INPUTS, 0, **options)
    assert drafted(head)
    assert torch.equal(ours.sequences, stock.sequences)
    assert torch.equal(ours.state, stock.state)
    run(target, INPUTS, 0, assistant=None, **options)
    assert not drafted(head)
    run(target, INPUTS, 0, assistant=LookupDrafter(), **options)
    assert not drafted(head)
    detach(target)
    run(target, INPUTS, 0, **options)
    assert not drafted(head)


def test_what_cannot_be_drafted_is_stocks_with_one_warning_for_each_reason(target: Any, head: DartHead) -> None:
    beams = target.generate(**INPUTS, **BEAMS)
    seen = target.generate(**INPUTS, do_sample=False, max_new_tokens=4, output_attentions=True, use_cache=True)
    attach(target, head)
    with pytest.warns(UserWarning, match="runs without drafts: .*num_beams=2"):
        assert torch.equal(target.generate(**INPUTS, **BEAMS), beams)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(target.generate(**INPUTS, **BEAMS), beams)
    with pytest.warns(UserWarning, match="output_attentions"):
        again = target.generate(**INPUTS, do_sample=False, max_new_tokens=4, output_attentions=True, use_cache=True)
    assert torch.equal(again, seen)
    assert not drafted(head)
    with pytest.raises(ValueError, match="num_beams=2"):  # who asks for drafts is told
        target.generate(**INPUTS, **BEAMS, assistant=head)


def test_errors_are_stocks(target: Any, head: DartHead) -> None:
    attach(target, head)
    with pytest.raises(ValueError, match="`max_new_tokens` must be greater than 0"):
        target.generate(**INPUTS, max_new_tokens=0)
    with pytest.raises(TypeError, match="hand a hf_dart drafter to assistant="):
        target.generate(**INPUTS, max_new_tokens=4, assistant_model=head)
    with pytest.raises(TypeError, match="DartHead"):
        attach(target, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_streamer_is_shown_the_prompt_once(target: Any, head: DartHead, use_cache: bool) -> None:
    prompt = prompts([7])
    options = {"do_sample": False, "max_new_tokens": 8, "use_cache": use_cache}
    stocks, ours = Record(), Record()
    target.generate(**prompt, **options, streamer=stocks)
    attach(target, head)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a cache there are no drafts
        target.generate(**prompt, **options, streamer=ours)
    assert ours.shown == stocks.shown
    assert drafted(head) is use_cache


def test_a_refused_call_shows_a_streamer_nothing(target: Any, head: DartHead) -> None:
    ours = Record()
    with pytest.raises(ValueError, match="use_cache"):
        target.generate(**prompts([7]), max_new_tokens=4, use_cache=False, assistant=head, streamer=ours)
    assert ours.shown == []


def test_pipelines(target: Any, head: DartHead) -> None:
    write = pipeline("text-generation", model=target, tokenizer=TOKENIZER)
    given = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    stock = write("bcdef", **given)
    attach(target, head)
    assert write("bcdef", **given) == stock
    assert drafted(head)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21 on transformers 5.23
def test_peft_wrapped(target: Any, head: DartHead) -> None:
    torch.manual_seed(0)
    wrapped = get_peft_model(target, LoraConfig(r=2, init_lora_weights=False)).double().eval()
    stock = run(wrapped, INPUTS, 0, **SAMPLED)
    attach(wrapped, head)
    assert torch.equal(run(wrapped, INPUTS, 0, **SAMPLED).sequences, stock.sequences)
    assert drafted(head)


def test_compiled(target: Any, head: DartHead) -> None:
    stock = run(target, INPUTS, 0, **SAMPLED)
    compiled = torch.compile(target, backend="eager")
    attach(compiled, head)
    assert torch.equal(run(compiled, INPUTS, 0, **SAMPLED).sequences, stock.sequences)
    assert drafted(head)


def test_deep_copies_draft_for_themselves(target: Any, head: DartHead) -> None:
    attach(target, head)
    twin = copy.deepcopy(target)
    with torch.no_grad():
        twin.lm_head.weight.mul_(-1)
    stock = run(twin, INPUTS, 0, assistant=None, **SAMPLED)
    ours = run(twin, INPUTS, 0, **SAMPLED)
    assert torch.equal(ours.sequences, stock.sequences)
    assert twin.generate.default is not head
    assert drafted(twin.generate.default)


def test_loading_another_head_leaves_the_default(target: Any, head: DartHead) -> None:
    attach(target, head)
    tiny_head(target)
    attach(target)
    run(target, INPUTS, 0, **SAMPLED)
    assert drafted(head)


def test_loaded_as_the_default(target: Any, head: DartHead, tmp_path: Any) -> None:
    head.save_pretrained(tmp_path)
    loaded = load_drafter(str(tmp_path), target=target, default=True)
    run(target, INPUTS, 0, **SAMPLED)
    assert drafted(loaded)
    with pytest.raises(ValueError, match="target=model"):
        load_drafter(str(tmp_path), default=True)


def test_statistics_are_there_when_a_streamer_ends(target: Any, head: DartHead) -> None:
    class Asks(Record):
        def end(self) -> None:
            assert drafted(head)
            super().end()

    asked = Asks()
    target.generate(**prompts([7]), **SAMPLED, assistant=head, streamer=asked)
    assert asked.shown[-1] == []
