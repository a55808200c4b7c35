"""What is refused: one sentence that names the remedy, nothing changed, on both routes into the loop."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from support.called import is_sentence
from support.cases import GREEDY, SAMPLED, replay
from support.compare import assert_identical, outcome, run, snapshot
from support.sentences import refused
from support.tiny import VOCABULARY, WINDOW, prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target
from support.users import Listener
from torch import Tensor
from transformers import DynamicCache, StaticCache, T5Config, T5ForConditionalGeneration

from hf_dart import DartHead, LookupDrafter
from hf_dart.decoding import request as options
from hf_dart.decoding.api import attach
from hf_dart.models.stock_steps import CACHE

INPUTS = prompts([7])
RIGHT_PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
}
ROUTES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "assistant": lambda drafter: {"assistant": drafter},
    "custom_generate": lambda drafter: {"custom_generate": drafter.generate},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 3, "do_sample": False}, "num_beams"),
    "constraints": ({"constraints": []}, "constraints=None"),
    "stock's own drafts": ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "multi-token prediction": ({"use_mtp": True}, "use_mtp"),
    "sampled beams": ({"num_beams": 2}, "num_beams"),
    "no cache": ({"use_cache": False}, "use_cache"),
    "no cache, by None": ({"use_cache": None}, "use_cache=None"),  # stock makes one and reads the text twice
    "offloaded": ({"cache_implementation": "offloaded"}, "cache"),
    "offloaded static": ({"cache_implementation": "offloaded_static"}, "cache"),
    "attentions": ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
    "some hidden states": ({"return_dict_in_generate": True, "output_hidden_states": [0, 1]}, "output_hidden_states"),
    "right padding": (RIGHT_PADDED, "left"),
    "a hole in the mask": ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]])}, "left"),
    "a row of padding": ({**prompts([3, 3]), "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "padding"),
    "an empty prompt": ({"input_ids": torch.zeros(1, 0, dtype=torch.long), "attention_mask": None}, "empty"),
    "no rows": ({name: value[:0] for name, value in INPUTS.items()}, "one row"),
    "ids that are no integers": ({"input_ids": INPUTS["input_ids"].float()}, "long"),
    "an assistant": ({"is_assistant": True}, "is_assistant"),
}


@pytest.fixture(params=ROUTES)
def drafting(request: pytest.FixtureRequest, head: DartHead) -> dict[str, Any]:
    """The keyword that brings in the head, by either route."""
    return ROUTES[request.param](head)


# Stock does not tell a callable of these.
REFUSED_BY_ATTACH: dict[str, tuple[dict[str, Any], str]] = {
    "paged": ({"cache_implementation": "paged"}, "paged"),
    "two assistants": ({"assistant_model": tiny_target("llama")}, "assistant_model"),
    "a custom loop": ({"custom_generate": lambda model, input_ids, **kwargs: input_ids}, "custom_generate"),
    "synced": ({"synced_gpus": True}, "synced_gpus"),
    "stop strings without a tokenizer": ({"stop_strings": ["a"]}, "tokenizer"),
    "token healing": ({"token_healing": True}, "heal_tokens"),
}


@pytest.mark.parametrize(("name", "route"), [*product(REFUSED, ROUTES), *product(REFUSED_BY_ATTACH, ["assistant"])])
def test_refused_options(target: Any, head: DartHead, name: str, route: str) -> None:
    """Nothing is changed, and the next call is as exact as ever."""
    given, words = {**REFUSED, **REFUSED_BY_ATTACH}[name]
    before = snapshot(target)
    arguments = {**INPUTS, **SAMPLED, **given, **ROUTES[route](head)}
    refused(lambda: target.generate(**arguments), ValueError, words)
    assert snapshot(target) == before
    assert_identical(target, head, INPUTS, **SAMPLED)


def test_the_targets_own_config_asks_for_other_modes(
    target: Any, head: DartHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever passes what the refusal names gets drafts."""
    for name, value in {"prompt_lookup_num_tokens": 3, "penalty_alpha": 0.6, "num_beams": 2}.items():
        monkeypatch.setattr(target.generation_config, name, value)
    with pytest.raises(ValueError, match=r" pass num_beams=1 and .*, or leave") as refusal:
        target.generate(**INPUTS, **GREEDY, assistant=head)
    named = {name: literal_eval(value) for name, value in re.findall(r"(\w+)=(\w+)", str(refusal.value))}
    assert_identical(target, head, INPUTS, **GREEDY, **named)


def test_sharded_targets(
    target: Any, head: DartHead, drafting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "is_fsdp_managed_module", lambda model: model is target)
    assert_identical(target, head, INPUTS, **SAMPLED)  # on one process there is nothing to be in step with
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    refused(lambda: target.generate(**INPUTS, **SAMPLED, **drafting, synced_gpus=False), ValueError, "whole")


def test_inputs_that_drafts_do_not_have(drafting: dict[str, Any]) -> None:
    target = tiny_target("gpt2")
    head = tiny_head(target)
    types = torch.ones_like(INPUTS["input_ids"])
    plain = run(target, INPUTS, 0, token_type_ids=types, **GREEDY).sequences
    assert not torch.equal(run(target, INPUTS, 0, **GREEDY).sequences, plain), "they were to matter"
    route = ROUTES["assistant" if "assistant" in drafting else "custom_generate"](head)
    refused(lambda: target.generate(**INPUTS, **GREEDY, token_type_ids=types, **route), ValueError, "token_type_ids")
    assert_identical(target, head, INPUTS, **GREEDY)
    attach(target, head)
    assert torch.equal(run(target, INPUTS, 0, token_type_ids=types, **GREEDY).sequences, plain)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft 0.21
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_running_states_with_an_adapter_for_each_row(family: str) -> None:
    """Levels of a tree are rows of their own, which PEFT has no adapters for."""
    adapter = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = get_peft_model(tiny_target(family), adapter)
    wrapped.double().eval()
    inputs, options = prompts([7, 4]), {**GREEDY, "adapter_names": ["default", "__base__"]}
    stock = run(wrapped, inputs, 0, **options).sequences
    attach(wrapped, LookupDrafter())
    assert torch.equal(run(wrapped, inputs, 0, **options).sequences, stock)
    with pytest.raises(ValueError, match=r"an adapter for each row .*of one adapter at a time"):
        wrapped.generate(**inputs, **options, assistant=LookupDrafter())


class Quantized(DynamicCache):
    """Stands where a `QuantizedCache` would: those need a backend that is not installed."""


def in_chunks(target: Any) -> dict[str, Any]:
    """Stock runs over the embeddings once for each chunk of the ids, or leaves them out (before 5.21)."""
    ids = INPUTS["input_ids"]
    embeddings = target.get_input_embeddings()(ids).detach()
    return {"input_ids": ids[:, -2:], "inputs_embeds": embeddings, "prefill_chunk_size": 1}


@contextmanager
def compressed(target: Any, entries: list[int], layers: list[int]) -> Iterator[dict[str, Any]]:
    """As kvpress does it: hooks drop entries after the prompt. Others might add some."""

    def change(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = kwargs[CACHE].layers[module.layer_idx]
        if kwargs["hidden_states"].shape[1] == 7:  # the prompt
            layer.keys, layer.values = layer.keys[:, :, entries], layer.values[:, :, entries]

    parts = [target.model.layers[layer].self_attn for layer in layers]
    hooks = [part.register_forward_hook(change, with_kwargs=True) for part in parts]
    yield {}
    for hook in hooks:
        hook.remove()


@contextmanager
def checkpointing(target: Any) -> Iterator[dict[str, Any]]:
    """It does nothing in eval mode."""
    head = tiny_head(target)
    target.gradient_checkpointing_enable()
    assert_identical(target, head, INPUTS, **GREEDY)
    target.train()
    yield {}
    target.gradient_checkpointing_disable()
    assert_identical(target, head, INPUTS, **GREEDY)


def passed(make: Callable[[Any], dict[str, Any]]) -> Callable[[Any], Any]:
    return lambda target: nullcontext(make(target))


# What refused calls pass, or what holds meanwhile, given their target.
SITUATIONS: dict[str, tuple[Callable[[Any], AbstractContextManager[dict[str, Any]]], str]] = {
    "a short cache": (passed(lambda target: {CACHE: StaticCache(config=target.config, max_cache_len=20)}), "[cC]ache"),
    "offloading": (passed(lambda target: {CACHE: DynamicCache(config=target.config, offloading=True)}), "[cC]ache"),
    "an unknown cache": (passed(lambda target: {CACHE: Quantized(config=target.config)}), "Quantized"),
    "embeddings beside ids, in chunks": (passed(in_chunks), "prefill_chunk_size"),
    "dropped entries": (lambda target: compressed(target, [0, 2, 4, 6], [0, 1]), "holds 4 entries after a prompt of 7"),
    "entries dropped in one layer": (lambda target: compressed(target, [0, 2, 4, 6], [1]), "holds 4 entries after"),
    "added entries": (lambda target: compressed(target, [0, *range(7)], [0, 1]), "holds 8 entries after"),
    "gradient checkpointing": (checkpointing, "gradient checkpointing off"),
}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # 5.17 has no other name for it
@pytest.mark.parametrize("name", SITUATIONS)
def test_refused_situations(target: Any, head: DartHead, drafting: dict[str, Any], name: str) -> None:
    situation, words = SITUATIONS[name]
    with situation(target) as given:
        refused(lambda: target.generate(**{**INPUTS, **GREEDY, **given, **drafting}), ValueError, words)
    assert_identical(target.eval(), head, INPUTS, **GREEDY)


@pytest.mark.parametrize("name", ["embeddings beside ids, in chunks", "dropped entries"])
def test_situations_that_the_prompt_shows(target: Any, head: DartHead, name: str) -> None:
    """A call that need not be drafted is stock's own, though the target has read the prompt by then."""
    situation, words = SITUATIONS[name]
    with situation(target) as given:
        stock = run(target, {**INPUTS, **given}, 3, **SAMPLED, streamer=(theirs := Listener()))
        attach(target, head)
        with pytest.warns(UserWarning, match=f"without drafts: .*{words}"):
            ours = run(target, {**INPUTS, **given}, 3, **SAMPLED, streamer=(listener := Listener()))
    assert torch.equal(ours.sequences, stock.sequences)
    assert torch.equal(ours.state, stock.state)
    assert listener.calls == theirs.calls


def test_failures_after_the_prompt_was_read(target: Any, head: DartHead) -> None:
    """A cache that was passed in is as it was, for stock's own call, too."""
    stock = run(target, INPUTS, 3, **SAMPLED, **{CACHE: DynamicCache(config=target.config)}).sequences

    def fails(session: Any) -> Any:
        raise ValueError("an observer that cannot begin")

    attach(target, head)
    head.observers = (fails,)
    with pytest.warns(UserWarning, match="without drafts: an observer"):
        ours = run(target, INPUTS, 3, **SAMPLED, **{CACHE: DynamicCache(config=target.config)}).sequences
    assert torch.equal(ours, stock)
    head.observers = ()
    for drafting in ({}, {"assistant": head}):
        cache, listener = DynamicCache(config=target.config), Listener(0, ValueError)
        with pytest.raises(ValueError, match=r"^$"):
            target.generate(**prompts([7, 7]), **GREEDY, **drafting, **{CACHE: cache}, streamer=listener)
        assert (cache.get_seq_length(), len(listener.calls)) == (0, 1), "a streamer's own error is no refusal"


@pytest.mark.parametrize("room", [8, WINDOW])
def test_static_caches_shorter_than_the_window(room: int) -> None:
    """Where all layers slide: stock's window is the cache then."""
    target = tiny_target("mistral")
    head = tiny_head(target)
    calls = [{**prompts([6]), **GREEDY, CACHE: StaticCache(config=target.config, max_cache_len=room)} for _ in range(2)]
    if room < WINDOW:
        refused(lambda: target.generate(**calls[0], assistant=head), ValueError, "room for 8 tokens")
    else:
        assert torch.equal(target.generate(**calls[0], assistant=head), target.generate(**calls[1]))
    assert_identical(target, head, INPUTS, **GREEDY)


@pytest.mark.parametrize(
    ("family", "rates", "part"),
    [
        ("llama", {"attention_dropout": 0.1}, "model"),
        ("llama", {"attention_dropout": 0.2}, "model.layers.0"),
        ("llama", {"attention_dropout": 0.0}, "model.layers.0"),
        ("gpt_neox", {"classifier_dropout": 0.1}, "gpt_neox.layers.0"),  # of a head that a causal model has not
    ],
)
def test_train_mode(family: str, rates: dict[str, float], part: str) -> None:
    """Attention drops out by a function, not by a module; without a share of it the function is that of eval mode."""
    target = tiny_target(family, **rates).train()
    head = tiny_head(target)
    target.eval().get_submodule(part).train()
    if drops := rates.get("attention_dropout"):
        for drafting in ROUTES.values():
            refused(lambda d=drafting: target.generate(**INPUTS, **GREEDY, **d(head)), ValueError, r"model\.eval\(\)")
    for mode in (GREEDY, SAMPLED):
        assert_identical(target.eval() if drops else target, head, INPUTS, **mode)
        assert head.last_stats.accepted > 0


class Jitter(torch.nn.Module):
    """Draws in train mode, which no name says."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * torch.rand_like(x)) if self.training else x


def test_train_mode_that_draws() -> None:
    target = tiny_target("llama")
    target.model.norm = torch.nn.Sequential(target.model.norm, Jitter()).eval()
    head = tiny_head(target)
    assert_identical(target, head, INPUTS, **GREEDY)
    target.train()
    refused(lambda: target.generate(**INPUTS, **GREEDY, assistant=head), ValueError, "random numbers.*eval")
    assert_identical(target.eval(), head, INPUTS, **GREEDY)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21 on transformers 5.23
def test_active_dropout_of_an_adapter(target: Any, head: DartHead, drafting: dict[str, Any]) -> None:
    """PEFT makes its layers in train mode, whatever the target's."""
    adapter = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.3)
    wrapped = get_peft_model(target, adapter).double()
    assert not target.training
    refused(lambda: wrapped.generate(**INPUTS, **GREEDY, **drafting), ValueError, "eval")
    assert_identical(wrapped.eval(), head, INPUTS, **GREEDY)


@pytest.mark.parametrize("make", [tiny_head, tiny_diffusion_drafter, tiny_eagle_drafter])
def test_active_dropout_of_a_drafter(target: Any, make: Any) -> None:
    """It would draw from the generator that tokens are drawn from."""
    drafter = make(target)
    drafter.add_module("dropping", torch.nn.Dropout(0.2))
    drafter.train()
    refused(lambda: target.generate(**INPUTS, **SAMPLED, assistant=drafter), ValueError, "drafter is in train mode")
    assert_identical(target, drafter.eval(), INPUTS, **SAMPLED)


@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "later steps"])
def test_positions_that_a_subclass_shifts(target: Any, head: DartHead, drafting: dict[str, Any], prompt: bool) -> None:
    """It asks for what stock tells, as Mllama does."""

    class Shifts(type(target)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, *args: Any, is_first_iteration: bool = False, **kwargs: Any) -> Any:
            inputs = super().prepare_inputs_for_generation(*args, is_first_iteration=is_first_iteration, **kwargs)
            if is_first_iteration is prompt:
                inputs["position_ids"] = inputs["position_ids"] + 1
            return inputs

        def _update_model_kwargs_for_generation(
            self, outputs: Any, model_kwargs: dict[str, Any], is_encoder_decoder: bool, **kwargs: Any
        ) -> Any:
            return super()._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder, **kwargs)

    target.__class__ = Shifts
    assert_identical(target, head, INPUTS, **GREEDY)
    ours = target.generate(**INPUTS, **GREEDY, **drafting)
    assert torch.equal(ours, target.generate(**INPUTS, **GREEDY))


def test_encoder_decoder() -> None:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config).eval()
    refused(lambda: attach(model), ValueError, "encoder-decoder")
    assert "generate" not in vars(model)
    drafter = replay(tiny_target("llama"), INPUTS, misses=[0.0], **GREEDY)
    refused(lambda: model.generate(**INPUTS, **GREEDY, custom_generate=drafter.generate), ValueError, "encoder-decoder")
    assert model.generate(**INPUTS, **GREEDY).shape[0] == 1


@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache`:FutureWarning")  # by PEFT
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (PromptTuningConfig, {"num_virtual_tokens": 3}, "soft prompts"),
        (PrefixTuningConfig, {"num_virtual_tokens": 3}, "soft prompts"),
        (LoraConfig, {"target_modules": ["q_proj", "v_proj"], "alora_invocation_tokens": [5, 6]}, "aLoRA"),
    ],
)
def test_adapters_that_trees_do_not_pass(
    target: Any, head: DartHead, drafting: dict[str, Any], kind: Any, options: dict[str, Any], words: str
) -> None:
    wrapped = get_peft_model(target, kind(task_type="CAUSAL_LM", **options)).double().eval()
    plain = run(wrapped, INPUTS, 0, **GREEDY).sequences
    refused(lambda: wrapped.generate(**INPUTS, **GREEDY, **drafting), ValueError, words)
    assert torch.equal(run(wrapped, INPUTS, 0, **GREEDY).sequences, plain)
    assert_identical(wrapped.unload() if kind is LoraConfig else target, head, INPUTS, **GREEDY)


# ---- arguments that fit no batch: stock's tokens, stock's own error, or one sentence ------------------------

IDS, MASK = prompts([7, 5]).values()
EMBEDDINGS = torch.nn.functional.one_hot(IDS % 32, 32).double()
POSITIONS = torch.arange(7)[None]


def processor(change: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {"input_ids": IDS, "logits_processor": [lambda ids, scores: change(scores)]}


# By what is wrong; True where stock raises.
MISFITS: dict[str, tuple[dict[str, Any], bool]] = {
    "ids of one dimension": ({"input_ids": IDS[0]}, True),
    "ids of three dimensions": ({"input_ids": IDS[None]}, True),
    "ids without tokens, in chunks": ({"input_ids": IDS[:, :0], "prefill_chunk_size": 2}, True),
    "ids as truths": ({"input_ids": IDS > 5}, True),
    "ids beyond the vocabulary": ({"input_ids": IDS + 60}, True),
    "ids twice": ({"input_ids": IDS, "inputs": IDS}, True),
    "embeddings without tokens": ({"inputs_embeds": EMBEDDINGS[:, :0]}, True),
    "embeddings of two dimensions": ({"inputs_embeds": EMBEDDINGS[0]}, True),
    "embeddings of another width": ({"inputs_embeds": EMBEDDINGS[..., :5]}, True),
    "embeddings of more rows than ids": ({"inputs_embeds": EMBEDDINGS, "input_ids": IDS[:1]}, True),
    "a mask of fewer tokens": ({"input_ids": IDS, "attention_mask": MASK[:, 1:]}, True),
    "a mask of more tokens": ({"input_ids": IDS, "attention_mask": torch.cat([MASK, MASK], 1)}, False),
    "a mask of more ones": ({"input_ids": IDS, "attention_mask": torch.ones(2, 9).long()}, False),
    "a mask of more rows": ({"input_ids": IDS, "attention_mask": torch.cat([MASK, MASK])}, True),
    "a mask of no tokens": ({"input_ids": IDS, "attention_mask": MASK[:, :0]}, True),
    "a mask of one row": ({"input_ids": IDS, "attention_mask": MASK[1:]}, True),
    "a mask as a list": ({"input_ids": IDS, "attention_mask": MASK.tolist()}, True),
    "positions of more rows": ({"input_ids": IDS, "position_ids": POSITIONS.expand(3, 7)}, True),
    "no positions": ({"input_ids": IDS, "position_ids": POSITIONS[:, :0]}, True),
    "logits of places": ({"input_ids": IDS, "logits_to_keep": torch.tensor([6])}, True),
    "scores of fewer rows": (processor(lambda scores: scores[:1]), True),
    "scores of one dimension": (processor(lambda scores: scores[0]), True),
    "no scores": (processor(lambda scores: None), True),
    "no chunks": ({"input_ids": IDS, "prefill_chunk_size": 0}, True),
    "no sequences": ({"input_ids": IDS, "num_return_sequences": 0}, False),
}


@pytest.fixture(scope="module", params=["qwen3", "gpt2"])
def any_pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    target = tiny_target(request.param)
    return target, tiny_head(target)


@pytest.mark.filterwarnings("ignore:Passing `")
@pytest.mark.parametrize("name", MISFITS)
def test_what_fits_no_batch(any_pair: tuple[Any, Any], name: str) -> None:
    given, raises = MISFITS[name]
    given = {**given, "do_sample": False, "max_new_tokens": 8}
    target, head = any_pair
    stock, ours = outcome(target, given, 0), outcome(target, given, 0, assistant=head)
    assert (stock.error is not None) is raises, stock.output
    if ours.error is None:
        assert torch.equal(ours.sequences, stock.sequences)
        return
    assert is_sentence(ours.output) or repr(ours.output) == repr(stock.output), ours.output
