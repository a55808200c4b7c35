"""Targets whose attention takes no mask of a tree: their kernel runs the prompt, another one the trees; the same text.

Stock, with that kernel, is the reference: in float64, without tolerance. The kernels are stand-ins; real ones are in
`tests/exact/test_exact_on_gpu.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from threading import Event, Thread, get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import attention_kernels as kernels
from support.attention_kernels import FLASH, FLEX, HUB, OWN, attends_to_trees, own_kernel, set_attention
from support.cases import GREEDY, MODES, batch, replay
from support.compare import assert_identical, run, tally
from support.engines import engine
from support.sentences import refused
from support.tiny import prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_dart import TreeConfig, attach
from hf_dart.drafters.language_model.drafter import LanguageModelDrafter
from hf_dart.drafters.layers import attend
from hf_dart.models import attention
from hf_dart.models.attention import TreeAttention, attend_in_groups, attention_of, grouped_attention
from hf_dart.models.trial import forget

EXACT = tally("float64, kernels of the user's")
KERNELS: dict[str, Callable[[], AbstractContextManager[kernels.Calls]]] = {
    **{FLASH: kernels.flash_kernels, HUB: lambda: kernels.flash_kernels(HUB)},
    **{OWN: own_kernel, FLEX: kernels.flex_kernel},
}
WITHOUT_SDPA = ("gemma2", "gpt_oss")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@contextmanager
def loaded(family: str, name: str, **config: Any) -> Iterator[tuple[Any, kernels.Calls]]:
    """A tiny target that drafts are for, as if it had been loaded with that attention."""
    target = tiny_target(family, "eager" if family in WITHOUT_SDPA else "sdpa", **config)
    if family in WITHOUT_SDPA and type(target)._supports_sdpa:  # Gemma 2 in older releases of transformers
        pytest.skip("an SDPA without soft caps, which the trial refuses")
    with KERNELS[name]() as calls:
        attach(set_attention(target, name))
        yield target, calls


def check(target: Any, modes: Any = MODES, sizes: tuple[int, ...] = (1, 4)) -> None:
    """Trees of a head that mostly guesses right, on one row and a padded batch that outgrows its window."""
    for size in sizes:
        for mode in modes:
            options = {**MODES[mode], "max_new_tokens": 24}
            inputs = batch(size, "sdpa")
            known = replay(target, inputs, misses=[0.1, 0.4, 0.3, 0.5][:size], **options)
            assert_identical(target, known, inputs, into=EXACT, **options)
            if size == 1:
                assert known.last_stats.tau > 1.3


BY_DEFAULT = [
    *(("mistral", FLASH), ("gemma3", HUB), ("qwen3", OWN)),
    *(("gemma2", FLASH), ("gpt_oss", HUB), ("gpt_oss", FLEX)),
]
PAIRS = [*product(["llama", "qwen3", "gemma3", "mistral", "phi3", "olmo2", "qwen3_moe", *WITHOUT_SDPA], KERNELS)]


@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(*pair, marks=() if pair in BY_DEFAULT else pytest.mark.matrix) for pair in PAIRS],
)
def test_the_same_text(family: str, name: str) -> None:
    """Through windows and sinks."""
    if name == OWN and family in WITHOUT_SDPA:
        pytest.skip("it knows no sinks and caps")
    by_default = (family, name) in BY_DEFAULT
    with loaded(family, name) as (target, _):
        check(target, ["greedy", "T=1"] if by_default else MODES, (1,) if name == FLEX and by_default else (1, 4))
        assert attention_of(target) == name


@pytest.mark.matrix
@pytest.mark.parametrize("name", KERNELS)
def test_attention_in_chunks(name: str) -> None:
    """Llama 4's, which stock refuses to run by FlashAttention, and which a kernel that knows no chunks leaves out."""
    if name == FLEX:
        with loaded("llama4", name) as (target, _):
            check(target)
        return
    refused = pytest.raises(ValueError, match=r"cannot handle chunked attention|computes something else")
    with refused, loaded("llama4", name):
        pass


@pytest.mark.parametrize(("family", "trees"), [("llama", "sdpa"), ("gpt_oss", "eager")])
def test_what_verifies_trees(family: str, trees: str) -> None:
    """Classes without SDPA take eager attention."""
    for name, wanted in ((FLASH, trees), (FLEX, trees), ("eager", "eager"), (trees, trees)):
        assert TreeAttention(set_attention(tiny_target(family, "eager"), name)).name == wanted


@pytest.mark.parametrize("size", [1, 4])
def test_prompts_and_steps_without_drafts_are_the_users(size: int) -> None:
    """Also in a padded batch, until a window is full."""
    options, inputs = {"do_sample": False, "max_new_tokens": 8}, batch(size, "sdpa")
    with loaded("llama", FLASH) as (target, calls):
        layers = target.config.num_hidden_layers
        drafter = replay(target, inputs, misses=[0.0] * size, **options)
        run(target, inputs, 0, **options, assistant=drafter)  # tries the target
        calls.queries.clear()
        run(target, inputs, 0, **options, assistant=drafter)
        width = inputs["input_ids"].shape[1]
        assert calls.queries == [width if size == 1 else 13] * layers
        calls.queries.clear()
        assert_identical(target, drafter, inputs, **options, tree_config=TreeConfig(nodes=1))
        assert calls.queries == 2 * [*[width if size == 1 else 13] * layers, *[1] * 7 * layers]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_fixed_shapes(family: str) -> None:
    """`hf_dart.compile` serves them, by packed attention or eagerly."""
    with loaded(family, FLASH) as (target, _):
        head = tiny_head(target)
        made = engine(target, head)
        for size in (1, 4):
            assert_identical(target, head, batch(size, "sdpa"), **GREEDY)
        assert any(made.tiers)
        assert attention_of(target) == FLASH


def test_drafters_with_attention_of_their_own() -> None:
    """Models and LoRAs that draft by masks, too."""
    with loaded("llama", OWN) as (target, _):
        small = set_attention(tiny_target("llama", seed=1), OWN)
        drafters = [tiny_eagle_drafter(target), tiny_diffusion_drafter(target)]
        for drafter in (*drafters, LanguageModelDrafter(small, target)):
            assert_identical(target, drafter, batch(4, "sdpa"), **GREEDY)


def test_a_kernel_that_computes_something_else() -> None:
    """Than SDPA would: its trees would be those of another model."""
    target = tiny_target("llama")
    head = tiny_head(target)
    with own_kernel(lambda mixed: mixed * 1.01):
        forget(set_attention(target, OWN))
        refused(lambda: run(target, batch(1, "sdpa"), 0, **GREEDY, assistant=head), ValueError, f"{OWN}.*sdpa")
        assert attention_of(target) == OWN
        assert run(target, batch(1, "sdpa"), 0, **GREEDY).sequences.shape == (1, 31)
        set_attention(target, "sdpa")
        assert_identical(target, head, batch(1, "sdpa"), **GREEDY)


def test_a_kernel_that_cannot_be_told_about_padding() -> None:
    """Nor does stock tell it: for padded rows it is refused, for others not."""
    from transformers import AttentionMaskInterface

    with loaded("llama", OWN) as (target, _):
        del AttentionMaskInterface._global_mapping[OWN]
        head = tiny_head(target)
        assert_identical(target, head, prompts([7]), **GREEDY)
        assert_identical(target, head, prompts([7, 7]), **GREEDY)
        refused(lambda: run(target, prompts([9, 4]), 0, **GREEDY, assistant=head), ValueError, "padded rows")


def test_errors_in_a_verifying_forward_leave_nothing() -> None:
    with loaded("llama", FLASH) as (target, _):
        head = tiny_head(target)

        def fail(*_: Any) -> None:
            if attends_to_trees():
                raise KeyboardInterrupt

        hook = target.model.layers[0].register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            run(target, batch(1, "sdpa"), 0, **GREEDY, assistant=head)
        hook.remove()
        assert target.config._attn_implementation == FLASH
        assert not attends_to_trees()
        assert_identical(target, head, batch(1, "sdpa"), **GREEDY)


@pytest.mark.parametrize("captured", [False, True])
def test_other_threads_see_the_users_kernel(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a verifying forward, captured or not: plain calls, drafted ones, and copies of the config."""
    with loaded("llama", FLASH) as (target, calls):
        head, other, inputs, layer = tiny_head(target), tiny_head(target), batch(4, "sdpa"), target.model.layers[0]
        engines = [engine(target, one) for one in (head, other) if captured]
        wanted, forward = run(target, inputs, 0, **GREEDY).sequences, layer.forward
        verifying, done = Event(), Event()
        me, found, named, waited = get_ident(), [], [], []

        def hold(*args: Any, **kwargs: Any) -> Any:
            if attends_to_trees() and get_ident() != me and not verifying.is_set():
                named.append(target.config._attn_implementation)
                verifying.set()
                waited.append(done.wait(120))
            return forward(*args, **kwargs)

        monkeypatch.setattr(layer, "forward", hold)
        found.append(run(target, inputs, 0, **GREEDY, assistant=head).sequences)  # tries the target again
        thread = Thread(target=lambda: found.append(target.generate(**inputs, **GREEDY, assistant=head)))
        thread.start()
        try:
            assert verifying.wait(120)
            calls.threads.clear()
            assert target.config._attn_implementation == FLASH
            for drafting in ({}, {"assistant": head}, {"assistant": tiny_head(target)}, {"assistant": other}):
                found.append(target.generate(**inputs, **GREEDY, **drafting))
            assert set(calls.threads) == {me}
            assert copy.deepcopy(target.config)._attn_implementation == FLASH
        finally:
            done.set()
            thread.join()
        assert named == [FLASH]
        assert waited == [True]
        assert len(found) == 6
        assert all(torch.equal(one, wanted) for one in found)
        assert all(any(made.tiers) for made in engines)


@pytest.mark.parametrize("family", ["qwen3", "falcon"])
def test_trees_read_keys_where_they_lie(family: str, noted: Any) -> None:
    """Also of classes that do something else where their attention has another name than "sdpa"."""
    target = tiny_target(family)
    head = tiny_head(target)
    packed = noted(attention, "attend_in_groups", lambda query, *_: query.shape[2])
    assert_identical(target, head, batch(4, "sdpa"), into=EXACT, **GREEDY)
    assert bool(packed) == (family == "qwen3")
    assert target.config._attn_implementation == "sdpa"


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("masked", [True, False])
def test_grouped_attention_is_stocks(groups: int, masked: bool) -> None:
    query, key, value = drawn(2, 2 * groups, 5, 8), drawn(2, 2, 11, 8, seed=1), drawn(2, 2, 11, 6, seed=2)
    hidden = drawn(2, 1, 5, 11, seed=3) < -0.3
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, torch.finfo(torch.float64).min)
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    arguments = {"attention_mask": mask if masked else None, "scaling": 0.3, "is_causal": False}
    found, _ = grouped_attention(module, query, key, value, **arguments)  # type: ignore[arg-type]
    wanted, _ = sdpa_attention_forward(module, query, key, value, **arguments)  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted)
    assert found.is_contiguous()
    # Under the masks of heads and DFlash drafters.
    torch.testing.assert_close(attend_in_groups(query, key, value, ~hidden), attend(query, key, value, ~hidden))
