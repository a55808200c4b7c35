"""Attaching, what stays untouched by it, and what is refused."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.cases import replay
from support.compare import assert_identical, run
from support.outcome import snapshot
from support.tiny import prompts, tiny_head, tiny_target
from support.users import TOKENIZER
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StopStringCriteria,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from hf_dart import DartHead, TreeConfig
from hf_dart.decoding.api import attach, detach

GREEDY = {"do_sample": False, "max_new_tokens": 16}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 16}
INPUTS = prompts([7])


@pytest.fixture
def target() -> Any:
    model = tiny_target("qwen3")
    # The first plain call that asks for hidden states installs transformers' own recording hooks for good.
    model(INPUTS["input_ids"], output_hidden_states=True)
    return model


@pytest.fixture
def head(target: Any) -> DartHead:
    return tiny_head(target)


# ---- attached and not -------------------------------------------------------------------------------------


@pytest.mark.parametrize("attached", [True, False])
def test_a_tree_reaches_the_callable(target: Any, attached: bool) -> None:
    head = tiny_head(target)
    if not attached:
        detach(target)
    for nodes in (1, 6):
        tree = TreeConfig(nodes=nodes, lookup=0)
        target.generate(**INPUTS, **GREEDY, custom_generate=head.generate, tree_config=tree)
        stats = head.last_stats
        assert stats is not None
        assert stats.rounds > 1
        assert stats.drafted == (nodes - 1) * (stats.rounds - stats.plain_rounds)
        assert stats.plain_rounds == stats.rounds if nodes == 1 else stats.plain_rounds <= 1


def test_attach_and_detach(target: Any) -> None:
    stock = run(target, INPUTS, 0, **SAMPLED)
    before = snapshot(target)
    head = tiny_head(target)
    assert "generate" in vars(target)
    plain = run(target, INPUTS, 0, **SAMPLED)
    assert torch.equal(plain.sequences, stock.sequences)
    assert torch.equal(plain.state, stock.state)
    assert detach(target) is target
    assert snapshot(target) == before
    with pytest.raises(ValueError, match="assistant"):
        target.generate(**INPUTS, **SAMPLED, assistant=head)
    detach(target)  # once more does no harm
    attach(attach(target))
    assert_identical(target, head, INPUTS, **SAMPLED)


def test_another_instance_is_not_touched(head: DartHead) -> None:
    other = tiny_target("qwen3")
    assert "generate" not in vars(other)
    with pytest.raises(ValueError, match="assistant"):
        other.generate(**INPUTS, **GREEDY, assistant=head)


def test_a_call_leaves_the_model_as_it_was(target: Any, head: DartHead) -> None:
    before, own = snapshot(target), set(vars(head))
    for options in (GREEDY, SAMPLED, {**SAMPLED, "return_dict_in_generate": True, "output_scores": True}):
        run(target, INPUTS, 0, assistant=head, **options)
        assert snapshot(target) == before
    assert set(vars(head)) == own


@pytest.mark.usefixtures("head")
def test_saving_an_attached_model(target: Any, tmp_path: Any) -> None:
    target.save_pretrained(tmp_path)
    again = type(target).from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(run(again, INPUTS, 0, **GREEDY).sequences, run(target, INPUTS, 0, **GREEDY).sequences)


def test_deep_copies_are_themselves(target: Any, head: DartHead) -> None:
    twin = copy.deepcopy(target)
    with torch.no_grad():
        twin.lm_head.weight.mul_(-1)
    stock = run(twin, INPUTS, 0, **GREEDY)
    assert not torch.equal(stock.sequences, run(target, INPUTS, 0, **GREEDY).sequences)
    assert_identical(twin, head, INPUTS, **GREEDY)
    assert_identical(twin, copy.deepcopy(head), INPUTS, **SAMPLED)
    assert_identical(target, copy.deepcopy(head), INPUTS, **SAMPLED)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21 on transformers 5.23
@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_peft_wrapped_target(target: Any, head: DartHead, task: str | None) -> None:
    plain = run(target, INPUTS, 0, **GREEDY).sequences
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type=task)
    wrapped = get_peft_model(target, adapter).double().eval()
    for options in (GREEDY, SAMPLED):
        for inputs in (INPUTS, prompts([9, 3, 7, 12])):
            assert_identical(wrapped, head, inputs, **options)
    adapted = run(wrapped, INPUTS, 0, **GREEDY).sequences
    assert not torch.equal(adapted, plain), "the adapter was to change the text"
    with wrapped.disable_adapter():
        ours = run(wrapped, INPUTS, 0, assistant=head, **GREEDY).sequences
        assert torch.equal(ours, plain)
    detach(wrapped)
    assert "generate" not in vars(target)
    made = tiny_head(wrapped)
    assert_identical(wrapped, made, INPUTS, **GREEDY)


def test_pickled_targets_keep_the_keyword() -> None:
    target = tiny_target("qwen3")
    head = tiny_head(target)
    again = pickle.loads(pickle.dumps(target))
    with torch.no_grad():
        again.lm_head.weight.mul_(-1)
    assert_identical(again, head, INPUTS, **GREEDY)
    assert not torch.equal(*(run(one, INPUTS, 0, **GREEDY).sequences for one in (target, again)))


def test_compiled_targets(target: Any) -> None:
    compiled = torch.compile(target, backend="eager")
    head = tiny_head(compiled)
    for model in (compiled, target):
        assert_identical(model, head, INPUTS, **GREEDY)
    detach(compiled)
    assert "generate" not in vars(target)
    assert attach(compiled) is compiled
    assert_identical(compiled, head, INPUTS, **SAMPLED)


def test_wrapped_forwards_are_told_positions(target: Any, head: DartHead) -> None:
    """A wrapper that hands all arguments on names none of them."""
    plain = target.forward
    target.forward = lambda *args, **kwargs: plain(*args, **kwargs)
    assert_identical(target, head, INPUTS, **GREEDY)
    assert_identical(target, replay(target, INPUTS, misses=[0.3], **GREEDY), INPUTS, **GREEDY)


def test_a_generate_of_the_instances_own(target: Any, head: DartHead) -> None:
    """It serves calls without drafts, and is there again after `detach`."""
    detach(target)
    own = target.generate = functools.partial(target.generate, max_new_tokens=3, do_sample=False)
    for _ in range(2):
        attach(target)
    assert target.generate(**INPUTS).shape[1] == 7 + 3
    assert target.generate(**INPUTS, assistant=None, tree_config=TreeConfig(), trace=True).shape[1] == 7 + 3
    assert target.generate(**INPUTS, **GREEDY, assistant=head).shape[1] == 7 + 16
    twin = copy.deepcopy(target)
    assert twin.generate(**INPUTS).shape[1] == 7 + 3
    assert detach(target).generate is own


def test_shallow_copies_are_attached_themselves(target: Any, head: DartHead) -> None:
    twin = attach(copy.copy(target))
    twin.generation_config = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert twin.generate(**INPUTS).shape[1] == 7 + 3
    assert_identical(twin, head, INPUTS)
    assert_identical(target, head, INPUTS, **GREEDY)


@pytest.mark.usefixtures("head")
def test_keywords_without_a_drafter(target: Any) -> None:
    stock = run(target, INPUTS, 0, **GREEDY).sequences
    ours = {"assistant": None, "tree_config": TreeConfig(nodes=4), "refine": 1, "trace": False}
    assert torch.equal(run(target, INPUTS, 0, **GREEDY, **ours).sequences, stock)


def test_pipeline(target: Any, head: DartHead) -> None:
    backend = TOKENIZER.backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="a", padding_side="left")
    write = pipeline("text-generation", model=target, tokenizer=tokenizer, device="cpu")
    config = GenerationConfig(max_new_tokens=16, do_sample=False, pad_token_id=0)
    for texts in ("hello", ["hello", "abc", "lossless"]):
        batch = {"batch_size": 3} if isinstance(texts, list) else {}
        stock = write(texts, generation_config=config, **batch)
        assert write(texts, generation_config=config, assistant=head, **batch) == stock
    assert head.last_stats is not None
    stopped = write("hello", generation_config=config, stop_sequence=stock[0][0]["generated_text"][12:14])
    assert len(stopped[0]["generated_text"]) < 21
    stop = {"stop_sequence": stock[0][0]["generated_text"][12:14], "assistant": head}
    assert write("hello", generation_config=config, **stop) == stopped


def test_generation_config_of_the_call_and_of_the_model(target: Any, head: DartHead) -> None:
    config = GenerationConfig(max_new_tokens=12, do_sample=True, top_k=7, temperature=0.8, eos_token_id=[3, 5])
    kept = config.to_dict()
    assert_identical(target, head, INPUTS, generation_config=config, pad_token_id=0)
    assert config.to_dict() == kept
    target.generation_config = GenerationConfig(max_new_tokens=9, eos_token_id=[4, 8], pad_token_id=0)
    stock, _ = assert_identical(target, head, prompts([9, 3, 7, 12]))
    assert stock.sequences.shape[1] <= 12 + 9
    assert_identical(target, head, {"inputs": INPUTS["input_ids"]})  # no mask


class AlsoStops(StopStringCriteria):
    """Stands beside stock's."""


@pytest.mark.parametrize("place", ["call", "model", "criteria", "both"])
def test_stop_strings_from_elsewhere(target: Any, head: DartHead, place: str) -> None:
    options: dict[str, Any] = {**GREEDY, "tokenizer": TOKENIZER}
    letters = TOKENIZER.decode(run(target, INPUTS, 0, **GREEDY).sequences[0, 12:14])
    if place == "model":
        target.generation_config.stop_strings = letters
    elif place == "call":
        target.generation_config.stop_strings = "never"
        options = {"generation_config": GenerationConfig(**GREEDY, stop_strings=letters), "tokenizer": TOKENIZER}
    elif place == "both":
        options |= {"stop_strings": letters, "stopping_criteria": [AlsoStops(TOKENIZER, "never")]}
    else:
        options |= {"stop_strings": "never", "stopping_criteria": [StopStringCriteria(TOKENIZER, letters)]}
    stock, _ = assert_identical(target, head, INPUTS, **options)
    assert stock.sequences.shape[1] == 14
    if place == "model":
        stock, _ = assert_identical(target, head, INPUTS, stop_strings=None, **GREEDY)
        assert stock.sequences.shape[1] == 7 + 16


@pytest.mark.parametrize("place", ["config", "criteria", "streamer"])
def test_arguments_given_by_position(target: Any, head: DartHead, place: str) -> None:
    ids = INPUTS["input_ids"]
    letters = TOKENIZER.decode(run(target, INPUTS, 0, **GREEDY).sequences[0, 12:14])
    config = GenerationConfig(**GREEDY, stop_strings=letters if place == "config" else None)
    stops = [StopStringCriteria(TOKENIZER, letters)] if place == "criteria" else []
    texts = []
    for drafting in ({}, {"assistant": head}):
        streamer = Put()
        by_position = {"config": (config,), "criteria": (config, [], stops)}.get(
            place, (config, [], [], None, False, None, streamer)
        )
        text = target.generate(ids, *by_position, tokenizer=TOKENIZER if place == "config" else None, **drafting)
        assert streamer.tokens == (text[0].tolist() if place == "streamer" else [])
        texts.append(text)
    assert torch.equal(*texts)
    assert texts[0].shape[1] == (7 + 16 if place == "streamer" else 14)
    with pytest.raises(TypeError, match="multiple values"):
        target.generate(ids, config, generation_config=config, assistant=head)


class Put(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """Nothing to do."""


# ---- exceptions -------------------------------------------------------------------------------------------


class Broken(Exception):
    pass


class RaisesAt(LogitsProcessor):
    """A processor that fails at its n-th call."""

    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise Broken
        return scores


class StopRaisesAt(StoppingCriteria):
    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise Broken
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("call", [1, 3, 8])
@pytest.mark.parametrize("kind", ["processor", "criterion"])
def test_after_an_exception_inside_a_call(target: Any, head: DartHead, kind: str, call: int) -> None:
    perfect = replay(target, INPUTS, misses=[0.0], **SAMPLED)
    before = snapshot(target)
    states = []
    for drafting in ({}, {"assistant": head}, {"assistant": perfect}):
        breaking: dict[str, Any] = (
            {"logits_processor": LogitsProcessorList([RaisesAt(call)])}
            if kind == "processor"
            else {"stopping_criteria": [StopRaisesAt(call)]}
        )
        torch.manual_seed(0)
        with pytest.raises(Broken):
            target.generate(**INPUTS, **SAMPLED, **breaking, **drafting)
        states.append(torch.get_rng_state())
        assert snapshot(target) == before
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])
    assert_identical(target, head, INPUTS, **SAMPLED)


def test_a_cache_passed_in_after_an_exception(target: Any, head: DartHead) -> None:
    """It holds a whole prefix of what it is the cache of, so that the next call can go on."""
    cache = DynamicCache(config=target.config)
    first = run(target, INPUTS, 0, past_key_values=cache, assistant=head, **GREEDY).sequences
    with pytest.raises(Broken):
        target.generate(
            input_ids=first,
            past_key_values=cache,
            logits_processor=LogitsProcessorList([RaisesAt(5)]),
            assistant=head,
            **GREEDY,
        )
    held = cache.get_seq_length()
    assert {layer.keys.shape[2] for layer in cache.layers} == {held}
    assert held >= first.shape[1] - 1
    fresh = DynamicCache(config=target.config)
    whole = run(target, {"input_ids": first}, 0, past_key_values=fresh, **GREEDY).sequences
    for ours, plain in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(ours.keys, plain.keys[:, :, :held], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(ours.values, plain.values[:, :, :held], rtol=1e-9, atol=1e-9)
    if held == first.shape[1] - 1:
        assert torch.equal(run(target, {"input_ids": first}, 0, past_key_values=cache, **GREEDY).sequences, whole)


class PutRaisesAt(BaseStreamer):
    def __init__(self, call: int) -> None:
        self.left = call

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise Broken

    def end(self) -> None:
        pass


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("size", [1, 4])
def test_a_streamer_that_breaks_off(target: Any, head: DartHead, size: int, own: bool) -> None:
    """Also beside a processor of the user's own, where all rows go in step."""
    before, inputs = snapshot(target), prompts([7, 3, 9, 5][:size])
    states = []
    for drafting in ({}, {"assistant": head}, {"assistant": replay(target, inputs, misses=[0.0] * size, **SAMPLED)}):
        processors = LogitsProcessorList([RaisesAt(99)] if own else [])
        torch.manual_seed(0)
        with pytest.raises(Broken):
            target.generate(**inputs, **SAMPLED, logits_processor=processors, streamer=PutRaisesAt(5), **drafting)
        states.append(torch.get_rng_state())
        assert snapshot(target) == before
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])
    assert_identical(target, head, INPUTS, **SAMPLED)


def test_in_inference_mode(target: Any, head: DartHead) -> None:
    for inputs in (INPUTS, prompts([7, 3, 9, 5])):
        with torch.inference_mode():
            for options in (GREEDY, SAMPLED, {**SAMPLED, "return_dict_in_generate": True, "output_scores": True}):
                assert_identical(target, head, inputs, **options)
        assert_identical(target, head, inputs, **SAMPLED)
