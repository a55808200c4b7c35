"""The trial at attach: right targets pass in every precision, wrong ones are refused, nothing is changed.

And the rule of what is the same but for rounding, in each dtype.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from support import tiny
from support.compare import assert_identical
from support.families import REFUSED
from support.tiny import prompts, tiny_head, tiny_target
from support.users import FromFive
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from hf_dart import attach, detach
from hf_dart.models import identity
from hf_dart.models import trial as probe
from hf_dart.models.stock_steps import CACHE
from hf_dart.models.tolerance import allowance, coarsest, difference, same
from hf_dart.models.trial import check_verification
from hf_dart.models.verify import MaskKind

GREEDY = {"do_sample": False}
NARROW = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _every_target_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "passed_trials", lambda built_from: {})


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gemma4_shared", "gpt2", "deepseek_v3", "mistral", "llama4", "bitnet"]
)
def test_right_targets_pass_in_every_precision(family: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        check_verification(tiny_target(family, "eager" if family == "gemma2" else "sdpa", dtype, seed=seed))


def kinds_are(monkeypatch: pytest.MonkeyPatch, other: Callable[[MaskKind], MaskKind]) -> None:
    """Let trees be masked as layers of another kind are."""
    right = MaskKind.mask
    monkeypatch.setattr(MaskKind, "mask", lambda kind, *given: right(other(kind), *given))


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("window", [10, 300, 4096])
def test_windows_are_told_apart_by_one_position(off: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the window, and although the probe never runs a text so long."""
    target = tiny_target("mistral", dtype=torch.float32, sliding_window=window, max_position_embeddings=8192)
    check_verification(copy.deepcopy(target))
    kinds_are(monkeypatch, lambda kind: replace(kind, window=kind.window - off))
    with pytest.raises(ValueError, match="something else for a token tree"):
        check_verification(target)


def test_forgotten_windows_show_in_low_precision_and_chunks_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as forgotten:
        kinds_are(forgotten, lambda kind: replace(kind, window=None))
        for window, dtype in product((10, 1000), NARROW):
            target = tiny_target("mistral", dtype=dtype, sliding_window=window, max_position_embeddings=8192)
            with pytest.raises(ValueError, match="something else for a token tree"):
                check_verification(target)
    kinds_are(monkeypatch, lambda kind: replace(kind, name="sliding_attention"))
    with pytest.raises(ValueError, match="something else for a token tree"):
        check_verification(tiny_target("llama4"))


NAMED = {
    "recurrent_gemma": "keeps running states in its modules", "deepseek_v32": "has a DynamicIndexedLayer",
    "axk2": "has a DynamicIndexedLayer",
    "minimax_m3_sparse": "has a MiniMaxM3VLSparseCacheLayer", "deepseek_v4": "has a DeepseekV4HCACache",
    "bloom": "cannot run a token tree", "falcon_alibi": "cannot run a token tree",
    "inkling": "computes something else for a token tree|cannot hold a token tree yet",  # from 5.18 on; in 5.17
}  # fmt: skip
"""Words of refusals, as patterns; the others compute something else for a tree."""


@pytest.mark.parametrize("family", REFUSED)
def test_refused_families(family: str) -> None:
    target = tiny_target(family, "eager")
    with pytest.raises(ValueError, match=r"^[^.]*(\.[^ ][^.]*)*call generate without assistant=\.$") as told:
        attach(target)
    assert re.search(NAMED.get(family, "computes something else for a token tree than stock"), str(told.value))
    assert "generate" not in vars(target)
    with pytest.raises(ValueError, match=r"call generate without assistant=\.$"):
        tiny_head(target)


class Unknown(LlamaForCausalLM):
    """Code that hf_dart has never seen."""


class SlidesBySlots(LlamaAttention):
    """Hides what lies more than `local_window` slots back; its cache does not know."""

    def forward(self, hidden_states: Tensor, *args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        past = kwargs[CACHE].get_seq_length(self.layer_idx) if kwargs.get(CACHE) else 0
        queries = torch.arange(past, past + hidden_states.shape[1])[:, None]
        keys = torch.arange(past + hidden_states.shape[1])
        seen = (keys <= queries) & (keys > queries - self.config.local_window)
        bias = torch.zeros(seen.shape, dtype=hidden_states.dtype).masked_fill(~seen, -1e30)[None, None]
        mask = bias if attention_mask is None else bias.minimum(attention_mask[..., : seen.shape[1]])
        return super().forward(hidden_states, *args, attention_mask=mask, **kwargs)


class FailsOnTrees(LlamaForCausalLM):
    """Remote code may fail in any way at all."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.ndim > 2:
            raise AssertionError("two dimensions, please")
        return super().forward(*args, attention_mask=attention_mask, **kwargs)


def unknown(model_class: type[LlamaForCausalLM], attention: str = "eager", **fields: Any) -> Any:
    known = tiny_target("llama", attention)
    config = copy.deepcopy(known.config)
    for name, value in fields.items():
        setattr(config, name, value)
    target = model_class(config).double().eval()
    target.load_state_dict(known.state_dict())
    return target


def test_unknown_code_passes_or_is_refused() -> None:
    target = unknown(Unknown)
    assert_identical(target, tiny_head(target), prompts([7]), **GREEDY, max_new_tokens=12)
    with pytest.raises(ValueError, match=r"cannot run a token tree \(AssertionError: two dimensions, please\); call"):
        check_verification(unknown(FailsOnTrees))


@pytest.mark.parametrize("window", [10, 100])
def test_a_window_that_only_the_config_names(window: int) -> None:
    target = unknown(Unknown, local_window=window)
    for index, layer in enumerate(target.model.layers):
        layer.self_attn = SlidesBySlots(target.config, index).double()
    with pytest.raises(ValueError, match="something else for a token tree"):
        check_verification(target)


def test_nothing_is_changed() -> None:
    for family, attention in (("gemma4_shared", "sdpa"), ("gpt2", "eager")):
        target = tiny_target(family, attention)
        weights = {name: tensor.clone() for name, tensor in [*target.named_parameters(), *target.named_buffers()]}
        config, members = target.config.to_dict(), [list(vars(module)) for module in target.modules()]
        before = torch.get_rng_state()
        check_verification(target)
        assert torch.equal(torch.get_rng_state(), before)
        assert target.config.to_dict() == config
        assert [list(vars(module)) for module in target.modules()] == members
        for name, tensor in [*target.named_parameters(), *target.named_buffers()]:
            assert torch.equal(tensor, weights[name]), name


@pytest.fixture
def tried(noted: Any) -> list[int]:
    """Lengths of the texts that trials run on."""
    return noted(probe._Trial, "run", lambda _, length, deepest: length)


def test_long_windows_are_tried_by_the_call_that_reaches_them(
    tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_AT_ATTACH", 20)
    target = tiny_target("mistral", sliding_window=100)
    head = tiny_head(target)
    assert set(tried) == {12}
    assert_identical(target, head, prompts([7]), **GREEDY, max_length=20)
    assert set(tried) == {12}
    assert_identical(target, head, prompts([7]), **GREEDY, max_length=110)
    assert set(tried) == {12, 97, 105}
    tried.clear()
    assert_identical(target, head, prompts([7]), **GREEDY, max_length=200)
    assert not tried

    # A window after the position table, which rotary models may leave.
    target = tiny_target("mistral", sliding_window=100, max_position_embeddings=60)
    head = tiny_head(target)
    assert_identical(target, head, prompts([7]), **GREEDY, max_length=140)
    assert set(tried) == {12, 97, 105}


SLIDING = {"family": "mistral", "sliding_window": 300, "max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("target", "forwards"), [({"family": "llama"}, 1 + 7), ({"family": "qwen3"}, 1 + 7), (SLIDING, 1 + 7 + 7 + 4)]
)
def test_a_trial_is_few_and_short_forwards(target: dict[str, Any], forwards: int) -> None:
    """Qwen3's number of layers with windows, 28, is no window."""
    tried, fed = tiny_target(**target), []
    hook = tried.register_forward_pre_hook(lambda *args: fed.append(args[-1]["input_ids"].numel()), with_kwargs=True)
    check_verification(tried)
    hook.remove()
    assert len(fed) == forwards
    assert max(fed) == 12


@pytest.mark.parametrize(("draws", "refused"), [(1, False), (99, True)])
def test_another_thread_may_draw_in_a_trial(draws: int, refused: bool) -> None:
    """What a target draws itself, it draws each time."""
    target, drawn = tiny_target("llama"), iter(range(draws))
    target.model.register_forward_pre_hook(lambda *_: None if next(drawn, None) is None else torch.rand(1) and None)
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="draws random numbers") if refused else nullcontext():
        attach(target)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    if not refused:
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_trial_that_takes_long_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    check_verification(tiny_target(**SLIDING))
    assert not caplog.messages
    monkeypatch.setattr(probe, "_LONG", 0.0)
    check_verification(tiny_target(**SLIDING))
    (message,) = caplog.messages
    assert "trying token trees on MistralForCausalLM" in message
    assert "after texts of 12, 297, 305 tokens: about" in message


def test_attention_scales_that_follow_slots_are_refused_where_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 tempers its attention every `floor_scale` slots; a tree's nodes share positions, not slots."""
    monkeypatch.setattr(probe, "_AT_ATTACH", 20)
    target = tiny_target("llama4", attn_temperature_tuning=True, floor_scale=150, attention_chunk_size=10)
    head = tiny_head(target)
    assert_identical(target, head, prompts([9, 3, 7, 13]), **GREEDY, max_length=60)
    with pytest.raises(ValueError, match="after 147 tokens logits differ"):
        target.generate(**prompts([7]), **GREEDY, max_length=140, assistant=head)


def steer(module: Any, args: Any, output: Tensor) -> Tensor:
    """Pushes the last position alone."""
    return torch.cat([output[:, :-1], output[:, -1:] + 3 * torch.arange(32).cos().to(output)], dim=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_hooks_that_look_at_the_last_token(dtype: torch.dtype) -> None:
    """Those that come and go after `attach`."""
    target = tiny_target("llama", dtype=dtype)
    head = tiny_head(target)
    plain = target.generate(**prompts([7]), **GREEDY, max_new_tokens=12, assistant=head)
    for _ in range(2):
        hook = target.model.layers[0].register_forward_hook(steer)
        with pytest.raises(ValueError, match="token tree"):
            target.generate(**prompts([7]), **GREEDY, max_new_tokens=12, assistant=head)
        hook.remove()
        again = target.generate(**prompts([7]), **GREEDY, max_new_tokens=12, assistant=head)
        assert torch.equal(again, plain)


class Pushes(nn.Module):
    """Stands in for a module."""

    def __init__(self, inner: nn.Module, last: bool = True) -> None:
        super().__init__()
        self.inner, self.last = inner, last

    def forward(self, states: Tensor) -> Tensor:
        return steer(self, None, self.inner(states)) if self.last else self.inner(states)


def pushing(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: steer(None, args, forward(*args))


@pytest.mark.parametrize("changed", ["class", "module", "instance"])
def test_another_code_is_tried_by_the_next_call(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = attach(tiny_target("llama"))
    layer = target.model.layers[0]
    if changed == "class":
        monkeypatch.setattr(LlamaMLP, "forward", pushing(LlamaMLP.forward))
    elif changed == "module":
        layer.mlp = Pushes(layer.mlp).eval()
    else:
        layer.mlp.forward = pushing(layer.mlp.forward)
    with pytest.raises(ValueError, match="token tree"):
        check_verification(target)


@pytest.mark.parametrize("detached", [False, True])
def test_what_code_reads_is_tried_by_attaching_again(detached: bool) -> None:
    target = tiny_target("llama")
    pushes = target.model.layers[0].mlp = Pushes(target.model.layers[0].mlp, last=False).eval()
    attach(target)
    pushes.last = True
    check_verification(target)  # it looks the same
    if detached:
        detach(target)
    with pytest.raises(ValueError, match="token tree"):
        attach(target)


def test_what_hangs_on_a_target_is_tried_once(tried: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks made again for every call, and those of transformers, cost no trial; another device costs one."""
    target = tiny_target("llama")
    head = tiny_head(target)
    for _ in range(2):
        assert_identical(target, head, prompts([7]), **GREEDY, max_new_tokens=4)
    assert len(tried) == 1
    for factor in torch.tensor([0.5, 2.0]):
        hook = target.model.layers[0].register_forward_hook(lambda module, args, output, by=factor: output * by)
        assert_identical(target, head, prompts([7]), **GREEDY, max_new_tokens=4)
        hook.remove()
    assert len(tried) == 2
    attach(target)
    assert len(tried) == 3
    monkeypatch.setattr(identity, "device_of", lambda module: torch.device("cuda:1"))
    for _ in range(2):
        check_verification(target)
    assert len(tried) == 4


class CountsPadding(LlamaForCausalLM):
    """Stock is told no positions in its steps, so that it counts slots."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs.pop("position_ids", None)
        return inputs


class SeesOneMore(LlamaForCausalLM):
    """Misplaces the padding of its steps, as GIT does."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        if kwargs.get("attention_mask") is not None:
            inputs["attention_mask"] = kwargs["attention_mask"].roll(1, dims=1)
        return inputs


class MixesRows(LlamaForCausalLM):
    """Takes the first row's positions for all."""

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        position_ids = None if position_ids is None else position_ids[:1]
        return super().forward(*args, position_ids=position_ids, **kwargs)


class KeepsWhenTold(LlamaForCausalLM):
    """Looks at `use_cache` before it writes."""

    def forward(self, *args: Any, use_cache: bool = False, **kwargs: Any) -> Any:
        kwargs[CACHE] = kwargs.get(CACHE) if use_cache else None
        return super().forward(*args, use_cache=use_cache, **kwargs)


@pytest.mark.parametrize("model_class", [CountsPadding, FromFive, KeepsWhenTold])
def test_what_stocks_steps_are_given_is_given_to_trees(model_class: type[LlamaForCausalLM]) -> None:
    target = unknown(model_class)
    for lengths in ([7], [9, 9], [9, 3, 7]):
        if lengths == [9, 3, 7]:
            target.set_attn_implementation("sdpa")  # eager attention gives NaN for padded rows in float64
        assert_identical(target, tiny_head(target), prompts(lengths), **GREEDY, max_new_tokens=12)


@pytest.mark.parametrize(
    ("model_class", "right", "wrong", "words"),
    [
        (SeesOneMore, [[7], [9, 9]], [9, 3], r"trees of padded rows .* pass rows of one length"),
        (MixesRows, [[7]], [9, 9], r"trees of several rows .* pass one row at a time"),
    ],
)
def test_what_is_wrong_of_some_rows_alone(model_class: Any, right: Any, wrong: list[int], words: str) -> None:
    target = unknown(model_class, attention="sdpa")
    head = tiny_head(target)
    for lengths in right:
        assert_identical(target, head, prompts(lengths), **GREEDY, max_new_tokens=12)
    with pytest.raises(ValueError, match=words):
        target.generate(**prompts(wrong), **GREEDY, max_new_tokens=12, assistant=head)
    assert_identical(target, head, prompts([7]), **GREEDY, max_new_tokens=12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_roundings_of_the_largest_number(dtype: torch.dtype) -> None:
    values = torch.linspace(-3, 5, 37, dtype=torch.float64)
    one = values.to(dtype)
    for share, is_rounding in ((0.9, True), (1.2, False)):
        other = one.double().clone()
        other[0] += share * allowance(dtype) * 5
        assert same(one, other) == is_rounding
        assert difference(one, other) <= allowance(dtype, noise=allowance(dtype))
    assert coarsest(one, torch.float64) == dtype
    assert coarsest(one.float(), torch.float64) == (torch.float32 if dtype == torch.float64 else dtype)
    assert difference(one, one) == difference(torch.zeros(3), torch.zeros(3)) == 0
    assert not same(one[:5], one)
    assert not same(torch.where(one < 0, torch.nan, one), one)
