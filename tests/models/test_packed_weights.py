"""Packed weights: trees are verified with them, and never with a copy of what a weight was before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread
from time import sleep
from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.cases import MODES, batch
from support.compare import assert_identical_up_to_near_ties, tally
from support.families import needs_running_states
from support.multimodal import multimodal_target
from support.tiny import tiny_head, tiny_target
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dart import LookupDrafter, attach, detach, generate_many
from hf_dart.models import packed_weights as packing
from hf_dart.models.forwards import StandIn, standing_in
from hf_dart.models.packed_weights import pack, packable, packed_weights, packs
from hf_dart.models.trial import forget


@pytest.fixture(autouse=True)
def _small_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_LEAST", 1)


pytestmark = pytest.mark.skipif(not packs(torch.float32), reason="PyTorch was built without oneDNN")
BFLOAT16 = pytest.param(
    torch.bfloat16, marks=pytest.mark.skipif(not packs(torch.bfloat16), reason="the processor has none")
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])


def compare(target: Any, head: Any, inputs: Any, **mode: Any) -> None:
    into = tally("packed weights")
    assert_identical_up_to_near_ties(target, head, inputs, into=into, label=str(mode), max_new_tokens=24, **mode)


@pytest.fixture
def target() -> Any:
    return tiny_target("llama", dtype=torch.float32)


def product(target: Any) -> tuple[Tensor, Tensor]:
    """A product with the LM head: as trees read it, and as it is."""
    hidden = torch.randn(3, 5, target.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with standing_in(packed_weights(target)):
            packed = target.lm_head(hidden)
        return packed, target.lm_head(hidden)


def spoil(target: Any) -> None:
    """Every copy becomes one of other numbers, which shows where copies are read."""
    for layer in packing._known[target].linear:
        layer.copy, layer.fewest = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach() + 1, 16), 1


def test_calls_that_begin_at_once_prepare_the_target_once(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards, packs = list[Any](), list[Any]()
    target.register_forward_pre_hook(lambda *_: forwards.append(None))
    start, drafter, pack_all = Barrier(3), LookupDrafter(), packing.PackedWeights.pack

    def slowly(weights: Any, layers: list[nn.Linear]) -> None:
        packs.append(None)
        sleep(0.1)
        pack_all(weights, layers)

    def call() -> None:
        start.wait()
        target.generate(**batch(1, "sdpa"), max_new_tokens=1, assistant=drafter)

    monkeypatch.setattr(packing.PackedWeights, "pack", slowly)
    forget(target)
    attach(target)
    forwards.clear()
    threads = [Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(packs), len(forwards)) == (1, 1 + 7 + 3), "a trial of packed weights, and three prompts"


@pytest.mark.parametrize("mode", ["greedy", "T=1"])
@dtypes
@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "mixtral", "opt", pytest.param("qwen3_5", marks=needs_running_states)]
)
def test_drafted_text_is_stocks(family: str, dtype: torch.dtype, mode: str) -> None:
    """With tied weights, experts, biases and running states."""
    target = tiny_target(family, dtype=dtype)
    compare(target, tiny_head(target), batch(3, "sdpa"), **MODES[mode])
    assert packing._known[target].linear


@dtypes
def test_trees_read_copies_and_stock_does_not(dtype: torch.dtype) -> None:
    """Wrong copies are found by the trial, which the first call with copies repeats."""
    target = tiny_target("llama", dtype=dtype)
    forget(target)
    head, options = tiny_head(attach(target)), {**MODES["greedy"], "max_new_tokens": 24}
    assert target not in packing._known, "attaching makes no copies"
    stock = target.generate(**batch(3, "sdpa"), **options)
    pack(target)
    spoil(target)
    assert torch.equal(target.generate(**batch(3, "sdpa"), **options), stock)
    for size, trees in ((1, "a token tree"), (3, "trees of padded rows")):
        with pytest.raises(ValueError, match=f"computes something else for {trees}"):
            target.generate(**batch(size, "sdpa"), **options, assistant=head)


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("fewest", [1, 3, 4])
def test_few_rows_read_what_is_faster(target: Any, fewest: int, fills: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows or more read the copies in any case; fewer of them are filled up where four take less time."""

    def measured(product: Any, entries: Tensor, weights: list[Tensor]) -> float:
        if product is torch.nn.functional.linear:
            return 1.0 + (len(entries) >= fewest)
        return 1.5 if fills and len(entries) == 4 else 1.9

    monkeypatch.setattr(packing, "seconds", measured)
    read, plain = [], packing.packed_linear
    monkeypatch.setattr(packing, "packed_linear", lambda *given: read.append(given[0].shape[-2]) or plain(*given))
    pack(target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for rows in range(1, 6):
            for entries in torch.randn(2, 1, rows, target.config.hidden_size, generator=generator).unbind():
                with standing_in(packed_weights(target)):
                    logits = target.lm_head(entries)
                torch.testing.assert_close(logits, target.lm_head(entries))
    assert read[::2] == [max(rows, 4 * fills) for rows in range(fewest, 6)]


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "written to": lambda layer: layer.weight.mul_(2),
    "moved": lambda layer: setattr(layer.weight, "data", layer.weight.data * 2),
    "loaded": lambda layer: layer.weight.copy_(layer.weight * 2),
    "replaced": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight * 2)),
}


def together(target: Any, head: Any, inputs: Any, **mode: Any) -> None:
    generate_many(target, [ids[mask.bool()] for ids, mask in zip(*inputs.values(), strict=True)], head, seed=0, **mode)


def drafts_read(
    target: Any, head: Any, monkeypatch: pytest.MonkeyPatch, write: Callable[..., None] = compare
) -> set[nn.Module]:
    """Layers whose copies drafts of several rows are made with, in one call."""
    inside, read = [False], set[int]()
    draft, plain = head.propose_ranked, packing.packed_linear

    def drafted(*given: Any) -> Any:
        inside[0] = len(given[1]) > 1
        try:
            return draft(*given)
        finally:
            inside[0] = False

    def seen(entries: Tensor, copy: Tensor, bias: Tensor | None = None) -> Tensor:
        if inside[0]:
            read.add(id(copy))
        return plain(entries, copy, bias)

    with monkeypatch.context() as patches:
        patches.setattr(head, "propose_ranked", drafted, raising=False)
        patches.setattr(packing, "packed_linear", seen)
        write(target, head, batch(3, "sdpa"), **MODES["T=1"])
    return {layer.module for layer in packing.packed_drafts(target, head) if id(layer.copy) in read}


def test_drafts_read_copies(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the head's weights and the target's LM head, or of the rows of it that a draft vocabulary has."""
    head = tiny_head(target)
    own = {part for part in head.modules() if isinstance(part, nn.Linear) if min(part.weight.shape) > 16}
    for write in (compare, together):
        assert drafts_read(target, head, monkeypatch, write) == {*own, target.lm_head}
    head.reduce_vocabulary(range(20))
    drafts_read(target, head, monkeypatch)
    assert drafts_read(target, head, monkeypatch) == {*own, *head.rows_read}
    with torch.no_grad():
        head.fc.weight.mul_(2)
    assert drafts_read(target, head, monkeypatch) == set()
    detach(target)
    assert target not in packing._known


def test_two_calls_share_what_stands_in(target: Any) -> None:
    """The module has its class's forward again once both have ended, whichever ends first."""
    pack(target)
    spoil(target)
    hidden = torch.ones(4, target.config.hidden_size)
    plain = target.lm_head(hidden)
    first, second = (standing_in(packed_weights(target)) for _ in range(2))
    with torch.no_grad():
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not torch.equal(target.lm_head(hidden), plain)
        second.__exit__(None, None, None)
    assert "forward" not in vars(target.lm_head)
    assert torch.equal(target.lm_head(hidden), plain)


@pytest.mark.parametrize("own", [False, True])
def test_a_copy_of_a_target_that_is_in_use(target: Any, own: bool) -> None:
    """It has its own forwards and reads its own weights, as plain ones."""
    if own:
        target.lm_head.forward = MethodType(lambda self, hidden: nn.Linear.forward(self, hidden) * 2, target.lm_head)
    pack(target)
    spoil(target)
    hidden = torch.ones(4, target.config.hidden_size)
    with torch.no_grad(), standing_in(packed_weights(target)):
        twin = copy.deepcopy(target)
        twin.lm_head.weight.mul_(3)
        plain = F.linear(hidden, twin.lm_head.weight) * (2 if own else 1)
        assert torch.equal(twin.lm_head(hidden), plain)
    assert torch.equal(twin.lm_head(hidden), plain)
    assert not any(isinstance(vars(part).get("forward"), StandIn) for part in twin.modules())


def test_towers_of_images_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are text."""
    monkeypatch.setattr(packing, "_ROWS", 1)
    target, kind = multimodal_target("llava").float(), nn.Linear
    tower = [part for part in target.get_encoder("image").modules() if isinstance(part, kind)]
    text = [part for part in target.get_decoder().modules() if isinstance(part, kind)]
    found = packable(target)
    assert tower
    assert {*text, target.lm_head} <= {*found}
    assert not {*tower} & {*found}


def test_a_forward_of_the_users_own_stays(target: Any) -> None:
    """Accelerate puts its hooks into instances, also into layers that are packed by then."""
    pack(target)
    own = target.lm_head.forward
    assert target.lm_head in packable(target)
    target.lm_head.forward = lambda hidden: own(hidden) * 2
    seen, plain = product(target)
    assert torch.equal(seen, plain)
    assert target.lm_head not in packable(target)
    del target.lm_head.forward
    seen, single = product(target)
    assert torch.equal(plain, single * 2)
    torch.testing.assert_close(seen, single)


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_read_as_it_is(target: Any, change: str) -> None:
    """And packed again once two calls have seen it as it is."""
    pack(target)
    CHANGES[change](target.lm_head)
    spoil(target)
    assert torch.equal(*product(target))
    pack(target)
    assert not packing._known[target].linear
    pack(target)
    torch.testing.assert_close(*product(target))
    spoil(target)
    assert not torch.allclose(*product(target))


def fused_step(weight: nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.1, fused=True).step()
    weight.grad = None


UNCOUNTED: dict[str, Callable[[nn.Parameter], Any]] = {
    "a fused optimizer": fused_step,
    "one number of .data": lambda weight: weight.data[3, 5].add_(1e-6),
    "rows that change places": lambda weight: weight.data.copy_(weight.data.flip(0)),
    "columns that change places": lambda weight: weight.data.copy_(weight.data.roll(2, 1)),
    "columns that change sign": lambda weight: weight.data[:, 1:8:2].neg_(),  # sums of words are the same
}


@pytest.mark.parametrize("change", UNCOUNTED)
def test_changes_that_no_version_counts(target: Any, change: str) -> None:
    """Each call looks at the contents: TRL trains with a fused AdamW between rollouts, PEFT merges into `.data`."""
    head, weight = tiny_head(target), target.lm_head.weight
    compare(target, head, batch(3, "sdpa"), **MODES["greedy"])
    assert packing._known[target].linear
    version = weight._version
    UNCOUNTED[change](weight)
    assert weight._version == version
    pack(target)
    assert not packing._known[target].linear
    assert torch.equal(*product(target))
    compare(target, head, batch(3, "sdpa"), **MODES["greedy"])


def test_a_changed_target_is_attached_once_more(target: Any) -> None:
    """The trial reads no copies of what the weights were, and the next call has new ones."""
    head = tiny_head(attach(target))
    compare(target, head, batch(3, "sdpa"), **MODES["greedy"])
    fused_step(target.lm_head.weight)
    spoil(target)
    attach(target)
    assert target not in packing._known
    compare(target, head, batch(3, "sdpa"), **MODES["greedy"])
    assert packing._known[target].linear


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_lora_lies_over_packed_weights(target: Any) -> None:
    wrapped = get_peft_model(target, LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)).eval()
    compare(wrapped, tiny_head(target), batch(3, "sdpa"), **MODES["greedy"])
    names = {layer: name for name, layer in target.named_modules()}
    assert not any("lora" in names[layer.module] for layer in packing._known[target].linear)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("attached", [False, True])
def test_a_merged_adapter_that_is_disabled(target: Any, attached: bool) -> None:
    """PEFT takes it out of `.data` in the next forward, which is the prefill or a trial's."""
    wrapped = get_peft_model(target, LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)).eval()
    head, options = tiny_head(target), {**batch(3, "sdpa"), **MODES["greedy"], "max_new_tokens": 24}
    wrapped.merge_adapter()
    wrapped.generate(**options, assistant=head)
    with wrapped.disable_adapter():
        if attached:
            attach(target)
        drafted = wrapped.generate(**options, assistant=head)
        assert torch.equal(drafted, wrapped.generate(**options))


def test_another_thread_reads_plain_weights(target: Any) -> None:
    pack(target)
    spoil(target)
    found: list[Tensor] = []
    hidden = torch.ones(1, target.config.hidden_size)
    with torch.no_grad(), standing_in(packed_weights(target)):
        here = target.lm_head(hidden)
        thread = Thread(target=lambda: found.append(target.lm_head(hidden).detach()))
        thread.start()
        thread.join()
    assert torch.equal(found[0], target.lm_head(hidden).detach())
    assert not torch.equal(found[0], here)


def test_too_little_memory_is_said_once(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(packing.logger, "warning_once", said.append)
    monkeypatch.setattr(packing, "free_memory", lambda: 1000)
    pack(target)
    assert target not in packing._known
    assert "plain weights" in said[0]
    assert torch.equal(*product(target))


def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Less what it holds, but for files that nobody reads; without a limit, what the machine has free."""
    files = {"memory.max": "5000\n", "memory.current": "4000\n", "memory.stat": "anon 7\ninactive_file 500\nfile 9\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(packing, "_CONTAINER", tmp_path)
    assert packing.free_memory() == 1500
    (tmp_path / "memory.max").write_text("max\n")
    assert packing.free_memory() > 2**20


def test_what_reads_plain_weights(target: Any) -> None:
    """Autocast, which multiplies what it casts, around a call or in a forward; a detached target; others."""
    pack(attach(target))
    spoil(target)
    narrow = torch.autocast("cpu", torch.bfloat16)
    with narrow:
        assert torch.equal(*product(target))
    inside = narrow(target.lm_head)
    hidden = torch.ones(4, target.config.hidden_size)
    with torch.no_grad(), standing_in(packed_weights(target)):
        assert torch.equal(inside(hidden), F.linear(hidden.bfloat16(), target.lm_head.weight.bfloat16()))
    detach(target)
    others = [tiny_target("llama", dtype=dtype) for dtype in (torch.float64, torch.float16)]
    for one in others:
        pack(one)
    with narrow:
        pack(tiny := tiny_target("llama", dtype=torch.float32))
    with torch.inference_mode():  # whose changes are not counted
        others.append(tiny_target("llama", dtype=torch.float32))
        pack(others[-1])
    assert not {target, tiny, *others} & {*packing._known}


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own, as it generates code
def test_a_compiled_forward_reads_plain_weights(target: Any) -> None:
    """Inductor has no product of packed weights that are given to it."""
    head, options = tiny_head(target), {**batch(1, "sdpa"), **MODES["greedy"], "max_new_tokens": 24}
    attach(target)
    stock = target.generate(**options)
    target.forward = torch.compile(target.forward)
    assert torch.equal(target.generate(**options, assistant=head), stock)
