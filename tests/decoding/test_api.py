"""Ways into drafted calls: `attach`, with a default drafter or without, and `custom_generate`."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.cases import replay
from support.compare import assert_identical, run, same, snapshot
from support.tiny import nearly, prompts, tiny_head, tiny_target
from support.users import TOKENIZER, Listener
from transformers import GenerationConfig, PreTrainedTokenizerFast, StopStringCriteria, pipeline
from transformers.generation import utils

from hf_dart import DartHead, LanguageModelDrafter, LookupDrafter, TreeConfig, attach, detach, load_drafter

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft 0.21
GREEDY = {"do_sample": False, "max_new_tokens": 16}
SAMPLED = {"do_sample": True, "top_k": 0, "max_new_tokens": 16}
INPUTS, TWO_ROWS = prompts([7]), prompts([7, 4])
BEAMS = {"num_beams": 2, "do_sample": False, "max_new_tokens": 8}


def drafted(head: DartHead) -> bool:
    """Return whether the head has drafted since it was last asked."""
    stats, head.last_stats = head.last_stats, None
    return stats is not None and stats.accepted > 0


# ---- attached and not -------------------------------------------------------------------------------------


def test_a_tree_reaches_the_callable(target: Any, head: DartHead) -> None:
    detach(target)
    for nodes in (1, 6):
        tree = TreeConfig(nodes=nodes, lookup=0)
        target.generate(**INPUTS, **GREEDY, custom_generate=head.generate, tree_config=tree)
        stats = head.last_stats
        assert stats.drafted == (nodes - 1) * (stats.rounds - stats.plain_rounds)
        assert stats.plain_rounds == stats.rounds if nodes == 1 else stats.plain_rounds <= 1 < stats.rounds


def test_attach_and_detach(target: Any) -> None:
    stock = run(target, INPUTS, 0, **SAMPLED)
    before = snapshot(target)
    head = tiny_head(target)
    assert "generate" in vars(target)
    same(run(target, INPUTS, 0, **SAMPLED), stock)
    assert detach(target) is target
    assert snapshot(target) == before
    with pytest.raises(ValueError, match="assistant"):
        target.generate(**INPUTS, **SAMPLED, assistant=head)
    detach(target)  # once more does no harm
    attach(attach(target))
    assert_identical(target, head, INPUTS, **SAMPLED)


@pytest.mark.usefixtures("head")
def test_saving_an_attached_model(target: Any, tmp_path: Any) -> None:
    target.save_pretrained(tmp_path)
    again = type(target).from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(run(again, INPUTS, 0, **GREEDY).sequences, run(target, INPUTS, 0, **GREEDY).sequences)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda target: pickle.loads(pickle.dumps(target))])
def test_copies_are_themselves(copied: Any) -> None:
    """Deep copies have a default drafter of their own."""
    target = tiny_target("qwen3")
    attach(target, head := tiny_head(target))
    twin = copied(target)
    with torch.no_grad():
        twin.lm_head.weight.mul_(-1)
    stock = run(twin, INPUTS, 0, **GREEDY, assistant=None)
    assert not torch.equal(stock.sequences, run(target, INPUTS, 0, **GREEDY).sequences)
    if copied is copy.deepcopy:
        assert torch.equal(run(twin, INPUTS, 0, **GREEDY).sequences, stock.sequences)
        assert twin.generate.default is not head
        assert drafted(twin.generate.default)
    for model, drafter, mode in ((twin, head, GREEDY), (twin, copy.deepcopy(head), SAMPLED), (target, head, SAMPLED)):
        detach(model)
        attach(model)
        assert_identical(model, drafter, INPUTS, **mode)


def test_an_output_has_stocks_keys(target: Any, head: DartHead) -> None:
    """A model's own `generate` may unpack it into a class of its own; copies and pickles keep the statistics."""
    _, ours = assert_identical(target, head, INPUTS, **GREEDY, return_dict_in_generate=True)
    for copied in (copy.copy, copy.deepcopy, lambda output: pickle.loads(pickle.dumps(output))):
        assert copied(ours.output).draft_stats.tau == head.last_stats.tau


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
    attach(wrapped, made)
    assert torch.equal(run(wrapped, INPUTS, 0, **GREEDY).sequences, adapted)
    assert drafted(made)


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_an_adapter_for_each_row(target: Any, head: DartHead, rows: int) -> None:
    """The trial of the first call has other rows."""
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = get_peft_model(target, adapter)
    wrapped.add_adapter("other", adapter)
    wrapped.double().eval()
    inputs, names = prompts([9, 3, 7, 12][:rows]), ["other", "default", "__base__", "other"][:rows]
    mixed, _ = assert_identical(wrapped, head, inputs, **SAMPLED, adapter_names=names)
    assert drafted(head)
    alike, _ = assert_identical(wrapped, head, inputs, **SAMPLED)
    assert not torch.equal(mixed.sequences, alike.sequences), "the adapters were to change the text"


@pytest.mark.parametrize("on", [{"target_modules": ["q_proj", "embed_tokens"]}, {"trainable_token_indices": [3, 5]}])
def test_adapters_of_the_embeddings(target: Any, on: dict[str, Any]) -> None:
    """Their wrappers of the table do not tell its size."""
    before = tiny_head(target, selector_rank=4)
    adapter = LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False, **on})
    wrapped = get_peft_model(target, adapter).double().eval()
    for drafter in (before, tiny_head(wrapped, selector_rank=4), LanguageModelDrafter(nearly(target), wrapped)):
        assert_identical(wrapped, drafter, INPUTS, **SAMPLED)
        assert drafted(drafter)


def test_compiled_targets(target: Any) -> None:
    compiled = torch.compile(target, backend="eager")
    head = tiny_head(compiled)
    for model in (compiled, target):
        assert_identical(model, head, INPUTS, **GREEDY)
    detach(compiled)
    assert "generate" not in vars(target)
    assert attach(compiled) is compiled
    stock, _ = assert_identical(compiled, head, INPUTS, **SAMPLED)
    attach(compiled, head)
    assert torch.equal(run(compiled, INPUTS, 0, **SAMPLED).sequences, stock.sequences)
    assert drafted(head)


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
    stop = {"stop_sequence": stock[0][0]["generated_text"][12:14]}
    stopped = write("hello", generation_config=config, **stop)
    assert len(stopped[0]["generated_text"]) < 21
    assert write("hello", generation_config=config, assistant=head, **stop) == stopped
    attach(target, head)
    assert write("hello", generation_config=config, **stop) == stopped
    assert drafted(head)


class AlsoStops(StopStringCriteria):
    """Stands beside stock's."""


STOPS: dict[str, Callable[[str], tuple[list[Any], dict[str, Any]]]] = {
    "a config": lambda letters: ([], {"generation_config": GenerationConfig(**GREEDY, stop_strings=letters)}),
    "a config by position": lambda letters: ([GenerationConfig(**GREEDY, stop_strings=letters)], {}),
    "criteria": lambda letters: (
        [],
        {**GREEDY, "stop_strings": "never", "stopping_criteria": [StopStringCriteria(TOKENIZER, letters)]},
    ),
    "criteria by position": lambda letters: (
        [GenerationConfig(**GREEDY), [], [StopStringCriteria(TOKENIZER, letters)]],
        {},
    ),
    "both": lambda letters: (
        [],
        {**GREEDY, "stop_strings": letters, "stopping_criteria": [AlsoStops(TOKENIZER, "never")]},
    ),
    "the model": lambda letters: ([], GREEDY),
}
"""Where strings may come from at which texts stop: arguments of a call by position and by name."""


@pytest.mark.parametrize("place", STOPS)
def test_stop_strings_from_elsewhere(target: Any, head: DartHead, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = TOKENIZER.decode(run(target, INPUTS, 0, **GREEDY).sequences[0, 12:14])
    target.generation_config.stop_strings = {"the model": letters, "a config": None}.get(place, "never")
    told: list[str] = []
    monkeypatch.setattr(utils.logger, "warning_once", told.append)
    texts, ids = [], INPUTS["input_ids"]
    for drafting in ({}, {"assistant": head}):
        by_position, options = STOPS[place](letters)
        texts.append(target.generate(ids, *by_position, **options, tokenizer=TOKENIZER, **drafting))
    assert torch.equal(*texts)
    assert texts[0].shape[1] == 14
    if place == "a config":
        assert not told, "stock deprecates keywords beside a config, and the call has none"
        assert options["generation_config"].stop_strings == letters
    if place == "the model":
        stock, _ = assert_identical(target, head, INPUTS, stop_strings=None, **GREEDY)
        assert stock.sequences.shape[1] == 7 + 16


def test_a_tokenizer_is_spelt_out_once(target: Any, head: DartHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock does so in every call, which takes seconds for a large vocabulary; new tokens make it another one."""
    spelt: list[int] = []
    own = StopStringCriteria.clean_tokenizer_vocab
    counted = staticmethod(lambda *args, **more: spelt.append(1) or own(*args, **more))
    monkeypatch.setattr(StopStringCriteria, "clean_tokenizer_vocab", counted)
    tokenizer = copy.deepcopy(TOKENIZER)
    for strings, times in (("ab", 1), (["ab"], 1), (["ab", "xyz"], 2), ("ab", 2)):
        target.generate(**INPUTS, **GREEDY, stop_strings=strings, tokenizer=tokenizer, assistant=head)
        assert len(spelt) == times
    tokenizer.add_tokens(["<new>"])
    target.generate(**INPUTS, **GREEDY, stop_strings="ab", tokenizer=tokenizer, assistant=head)
    assert len(spelt) == 3


def test_a_streamer_by_position(target: Any, head: DartHead) -> None:
    texts, shown, config = [], [], GenerationConfig(**GREEDY)
    for drafting in ({}, {"assistant": head}):
        streamer = Listener()
        texts.append(target.generate(INPUTS["input_ids"], config, [], [], None, False, None, streamer, **drafting))
        shown.append(streamer.calls)
    assert torch.equal(*texts)
    assert shown[0] == shown[1] != []
    with pytest.raises(TypeError, match="multiple values"):
        target.generate(INPUTS["input_ids"], config, generation_config=config, assistant=head)


# ---- a default drafter -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [SAMPLED, GREEDY])
def test_every_call_drafts(target: Any, head: DartHead, options: dict[str, Any]) -> None:
    stock = run(target, TWO_ROWS, 0, **options)
    assert attach(target, head) is target
    same(run(target, TWO_ROWS, 0, **options), stock)
    assert drafted(head)
    for drafter in (None, LookupDrafter()):
        run(target, TWO_ROWS, 0, assistant=drafter, **options)
        assert not drafted(head)
    detach(target)
    run(target, TWO_ROWS, 0, **options)
    assert not drafted(head)


def test_what_cannot_be_drafted_is_stocks_with_one_warning_for_each_reason(target: Any, head: DartHead) -> None:
    beams = target.generate(**TWO_ROWS, **BEAMS)
    seen = target.generate(**TWO_ROWS, do_sample=False, max_new_tokens=4, output_attentions=True, use_cache=True)
    attach(target, head)
    with pytest.warns(UserWarning, match="runs without drafts: .*num_beams=1"):
        assert torch.equal(target.generate(**TWO_ROWS, **BEAMS), beams)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(target.generate(**TWO_ROWS, **BEAMS), beams)
        target.generate(**TWO_ROWS, **{**BEAMS, "num_beams": 3})  # the same reason
    with pytest.warns(UserWarning, match="output_attentions"):
        again = target.generate(**TWO_ROWS, do_sample=False, max_new_tokens=4, output_attentions=True, use_cache=True)
    assert torch.equal(again, seen)
    assert not drafted(head)
    with pytest.raises(ValueError, match="num_beams=1"):  # who asks for drafts is told
        target.generate(**TWO_ROWS, **BEAMS, assistant=head)


def test_errors_are_stocks(target: Any, head: DartHead) -> None:
    attach(target, head)
    with pytest.raises(ValueError, match="`max_new_tokens` must be greater than 0"):
        target.generate(**TWO_ROWS, max_new_tokens=0)
    with pytest.raises(TypeError, match="pass a hf_dart drafter as assistant="):
        target.generate(**TWO_ROWS, max_new_tokens=4, assistant_model=head)


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_streamer_is_shown_the_prompt_once(target: Any, head: DartHead, use_cache: bool) -> None:
    options = {"do_sample": False, "max_new_tokens": 8, "use_cache": use_cache}
    stocks, ours = Listener(), Listener()
    target.generate(**INPUTS, **options, streamer=stocks)
    attach(target, head)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a cache there are no drafts
        target.generate(**INPUTS, **options, streamer=ours)
    assert ours.calls == stocks.calls
    assert drafted(head) is use_cache
    if not use_cache:
        with pytest.raises(ValueError, match="use_cache"):
            target.generate(**INPUTS, **options, assistant=head, streamer=(unused := Listener()))
        assert unused.calls == []


def test_loaded_as_the_default(target: Any, head: DartHead, tmp_path: Any) -> None:
    """Another head that is loaded later leaves it."""
    head.save_pretrained(tmp_path)
    loaded = load_drafter(str(tmp_path), target=target, default=True)
    load_drafter(str(tmp_path), target=target)
    attach(target)
    run(target, TWO_ROWS, 0, **SAMPLED)
    assert drafted(loaded)
    with pytest.raises(ValueError, match="target=model"):
        load_drafter(str(tmp_path), default=True)


def test_statistics_are_there_when_a_streamer_ends(target: Any, head: DartHead) -> None:
    class Asks(Listener):
        def end(self) -> None:
            assert drafted(head)
            super().end()

    asked = Asks()
    target.generate(**INPUTS, **SAMPLED, assistant=head, streamer=asked)
    assert asked.calls[-1] == "end"
