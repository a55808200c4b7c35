"""Kernels for Triton against plain references: in its interpreter, on a CPU, and compiled for a GPU without one.

Triton chooses its interpreter when it is imported, so these tests run in a process of their own (`test_interpreted`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import batch
from support.compare import assert_identical
from support.engines import engine
from support.tiny import tiny_head, tiny_target
from torch import Tensor
from torch.nn import functional as F

from hf_dart.engine.compiling import compiled
from hf_dart.engine.config import EngineConfig
from hf_dart.target.fused import fuse
from hf_dart.target.masks import MaskKind

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
interpreted = pytest.mark.skipif(not INTERPRETS, reason="runs in a process of its own, see test_interpreted")
GREEDY = {"do_sample": False, "max_new_tokens": 8}


@pytest.mark.matrix  # for minutes
@needs_triton
@pytest.mark.skipif(INTERPRETS, reason="this is that process")
def test_interpreted() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-rA", __file__]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "PASSED" in run.stdout


def case(
    batch: int, nodes: int, slots: int, window: int | None, seed: int = 0
) -> tuple[MaskKind, Tensor, Tensor, Tensor, Tensor]:
    """Random trees after texts of random lengths: the kind, ancestors, positions, lengths, and all that is seen."""
    generator = torch.Generator().manual_seed(seed)
    ancestors, depths = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1), torch.zeros(batch, nodes).long()
    for row in range(batch):
        for node in range(1, nodes):
            parent = int(torch.randint(node, (), generator=generator))
            ancestors[row, node] |= ancestors[row, parent]
            depths[row, node] = depths[row, parent] + 1
    lengths = torch.randint(1, slots + 1, (batch,), generator=generator)
    positions, places = lengths[:, None] + depths, torch.arange(slots)
    past = (places < lengths[:, None])[:, None].expand(-1, nodes, -1)
    tree = ancestors
    kind = MaskKind("full_attention" if window is None else "sliding_attention", window, 0)
    if window is not None:
        past = past & (places > positions[..., None] - window)
        tree = tree & (positions[:, None] > positions[..., None] - window)
    return kind, ancestors, positions, lengths, torch.cat([past, tree], dim=-1)[:, None]


@interpreted
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    ("rows", "heads", "kv", "nodes", "width", "out_width", "slots"),
    [
        (1, 4, 2, 8, 16, 16, 24),  # one part
        (2, 6, 2, 13, 20, 24, 300),  # several; widths that are no powers of two
        (1, 4, 2, 70, 16, 16, 200),  # two words, more than one block of queries
        (2, 2, 2, 1, 16, 16, 8),  # no groups, roots alone
        (3, 4, 1, 64, 32, 32, 520),  # the last bit of a word
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_attention_is_pytorchs(
    rows: int, heads: int, kv: int, nodes: int, width: int, out_width: int, slots: int, window: int | None, dtype: Any
) -> None:
    from hf_dart.engine.tree_attention import TreeMask, counters

    generator = torch.Generator().manual_seed(1)
    query = torch.randn(rows, nodes, heads, width, generator=generator, dtype=torch.float64).transpose(1, 2).to(dtype)
    key = torch.randn(rows, kv, slots + nodes, width, generator=generator, dtype=torch.float64).to(dtype)
    value = torch.randn(rows, kv, slots + nodes, out_width, generator=generator, dtype=torch.float64).to(dtype)
    kind, ancestors, positions, lengths, seen = case(rows, nodes, slots, window)
    wide = (part.double() for part in (query, key, value))
    wanted = F.scaled_dot_product_attention(*wide, attn_mask=seen, scale=0.3, enable_gqa=True).transpose(1, 2)
    # What stands after a row's text is not even read.
    beyond = (torch.arange(slots + nodes) >= lengths[:, None]) & (torch.arange(slots + nodes) < slots)
    for part in (key, value):
        part.masked_fill_(beyond[:, None, :, None], torch.nan)
    mask = TreeMask.of(kind, ancestors, positions, lengths, slots, counters(key.device))
    found = mask(query, key, value, 0.3)
    assert found.dtype == dtype
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=16 * torch.finfo(dtype).eps)
    assert not mask.done.any()  # as the next layer has to find it
    assert torch.equal(mask(query, key, value, 0.3), found)


def write(target: Any, attention: str, backend: str | None) -> None:
    """Whole calls, alone and with nodes shared by a batch: stock's text, by that attention."""
    head = tiny_head(target)
    made = engine(target, head, tree_attention=attention, backend=backend)
    for size in (1, 3):
        assert_identical(target, head, batch(size, "sdpa"), **GREEDY)
    assert made.tiers
    assert all(tier is not None and tier.round.verifier._kernels.tree_attention == attention for tier in made.tiers)


@interpreted
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_rounds(family: str, backend: str | None) -> None:
    """Whole calls, alone and with nodes shared by a batch, in float64: stock's text."""
    write(tiny_target(family), "triton", backend)


@interpreted
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(("family", "fuse"), [("qwen3", True), ("llama", False)])
def test_heads(family: str, fuse: bool, backend: str | None) -> None:
    """With norms of heads and without, alone and with nodes shared by a batch: stock's text."""
    target = tiny_target(family)
    head = tiny_head(target)
    made = engine(target, head, tree_attention="triton", fused_heads=True, fuse=fuse, backend=backend)
    for size in (1, 3):
        assert_identical(target, head, batch(size, "sdpa"), **GREEDY)
    assert made.tiers
    layers = target.config.num_hidden_layers
    assert all(tier is not None and len(tier.round.verifier._kernels.heads) == layers for tier in made.tiers)
    assert not any("forward" in vars(part) for part in target.modules())


@interpreted
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "width", "size"), [(5, 24, 40), (70, 100, 130)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_product_is_pytorchs(dtype: Any, rows: int, width: int, size: int, gated: bool) -> None:
    from hf_dart.engine.layers import product

    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x, norm, weight = random(1, rows, size), random(size), random(width, size) / size**0.5
    bias, added = (None, None) if gated else (random(width), random(1, rows, width))
    for eps in (0.0, 0.5):
        wide = x.double()
        normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.double()
        if gated:
            gate, up = F.linear(normed, weight.double()).chunk(2, -1)
            wanted = F.silu(gate) * up
        else:
            wanted = F.linear(normed, weight.double(), bias.double()) + added.double()
        found = product(x, weight, bias, norm, eps, added, gated)
        # Norms are of float32, as the modules' are.
        atol = 16 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=atol)
    if not gated:
        plain = product(x, weight, None, None, 0.0, None, False)
        torch.testing.assert_close(plain, F.linear(x, weight), rtol=0, atol=16 * torch.finfo(dtype).eps)


@interpreted
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_layers(family: str, backend: str | None) -> None:
    """Norms of heads or biases, alone and with nodes shared by a batch: stock's text."""
    target = tiny_target(family)
    head = tiny_head(target)
    made = engine(
        target, head, tree_attention="triton", fused_heads=True, fuse=True, fused_layers=True, backend=backend
    )
    for size in (1, 3):
        assert_identical(target, head, batch(size, "sdpa"), **GREEDY)
    assert made.tiers
    layers = target.config.num_hidden_layers
    assert all(tier is not None and len(tier.round.verifier._kernels.layers) == layers for tier in made.tiers)
    assert not any("forward" in vars(part) for part in target.modules())


@interpreted
def test_layers_of_another_form() -> None:
    """Residuals that are scaled, another activation, norms by 1 + w after the attention: told by their numbers.

    So may a forward of an instance's own be, which rounds as the layer does or more: it is not passed by.
    """
    from hf_dart.engine import heads, layers

    def replaced(target: Any) -> int:
        return len(layers.forwards_of(target, heads.forwards_of(target), fuse(target)))

    llama: Any = tiny_target("llama")
    assert replaced(llama) == 2
    llama.model.layers[0].mlp.down_proj.forward = llama.model.layers[0].mlp.down_proj.forward
    assert replaced(llama) == 1
    assert heads.forwards_of(granite := tiny_target("granite", residual_multiplier=0.5))
    assert not replaced(granite)
    assert not replaced(tiny_target("llama", hidden_act="gelu"))
    assert not replaced(tiny_target("gemma3"))


@interpreted
@pytest.mark.parametrize("family", ["gemma3", "cohere2", "deepseek_v3"])
def test_attentions_of_another_form(family: str) -> None:
    """Norms by 1 + w, rotation of neighbours, keys of low rank: each is told by its numbers, and keeps its own."""
    from hf_dart.engine.heads import forwards_of

    assert not forwards_of(tiny_target(family))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_in_other_dtypes(dtype: Any) -> None:
    from hf_dart.engine.heads import forwards_of

    assert len(forwards_of(tiny_target("qwen3", dtype=dtype))) == 2


@interpreted
def test_a_wrong_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_dart.engine import tree_attention

    right = tree_attention.as_words
    monkeypatch.setattr(tree_attention, "as_words", lambda seen: right(seen.roll(1, -1)))
    target = tiny_target("qwen3")
    head = tiny_head(target)
    engine(target, head, tree_attention="triton")
    with pytest.warns(UserWarning, match="go on without the kernels that were asked for: .*computes something else"):
        assert_identical(target, head, batch(1, "sdpa"), **GREEDY)


not_interpreted = pytest.mark.skipif(INTERPRETS, reason="needs no interpreter")


@not_interpreted
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 9])
def test_flex_attention_is_pytorchs(window: int | None) -> None:
    from hf_dart.engine.flex_attention import FlexMask

    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(2, heads, length, 20, generator=generator, dtype=torch.float64)
        for heads, length in ((6, 13), (2, 313), (2, 313))
    )
    *_, seen = case(2, 13, 300, window)
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.3, enable_gqa=True)
    for mask in (seen, torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min / 2)):
        found = FlexMask.of(mask)(query, key, value, 0.3)
        torch.testing.assert_close(found, wanted.transpose(1, 2), rtol=0, atol=1e-14)
        assert found.is_contiguous()


@not_interpreted
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own, as it traces
def test_flex_attention_is_compiled_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tiers, batches and engines there are: Dynamo counts what it compiles of one function."""
    from hf_dart.engine import flex_attention

    monkeypatch.setattr(flex_attention, "compiled", lambda part, backend: compiled(part, "eager"))
    query, key = torch.randn(1, 2, 3, 16), torch.randn(1, 1, 20, 16)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for slots in (19, 20):  # shapes that no other test has
            *_, seen = case(1, 3, slots - 3, None)
            mask = flex_attention.FlexMask.of(seen)
            found = flex_attention.attend(query, key[:, :, :slots], key[:, :, :slots], seen, *mask.blocks, 0.3, True)
            wanted = F.scaled_dot_product_attention(
                query, key[:, :, :slots], key[:, :, :slots], attn_mask=seen, scale=0.3, enable_gqa=True
            )
            torch.testing.assert_close(found, wanted.transpose(1, 2))


@not_interpreted
@pytest.mark.parametrize("window", [None, 9])
def test_blocks_that_are_seen(window: int | None) -> None:
    """As FlexAttention's own search finds them."""
    from torch.nn.attention.flex_attention import create_block_mask

    from hf_dart.engine.flex_attention import FlexMask

    *_, seen = case(3, 150, 500, window)
    seen[0, :, :128, 128:384] = True
    found = FlexMask.of(seen)
    wanted = create_block_mask(lambda row, head, node, key: seen[row, 0, node, key], 3, None, *seen.shape[2:], "cpu")
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    assert all(torch.equal(blocks, getattr(wanted, name)) for blocks, name in zip(found.blocks, names, strict=True))
    assert found.blocks[2].any()


@not_interpreted
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own, as it traces
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize(
    ("backend", "dtype"), [(None, torch.float64), pytest.param("aot_eager", torch.float32, marks=pytest.mark.matrix)]
)
def test_rounds_by_flex_attention(family: str, backend: str | None, dtype: Any) -> None:
    """Whole calls, alone and with nodes shared by a batch: stock's text. PyTorch compiles it in float32 at most."""
    write(tiny_target(family, dtype=dtype), "flex", backend)


@needs_triton
@not_interpreted
def test_without_a_gpu() -> None:
    """Kernels that cannot run are told once, and done without."""
    target = tiny_target("qwen3")
    head = tiny_head(target)
    made = engine(target, head, tree_attention="triton", fused_heads=True, first_tier=64)
    with (
        pytest.warns(UserWarning, match="fused_heads is left out: no attention of Qwen3ForCausalLM computes the same"),
        pytest.warns(UserWarning, match="go on without the kernels that were asked for"),
    ):
        assert_identical(target, head, batch(1, "sdpa"), **GREEDY)
    (tier,) = made.tiers
    assert tier is not None


def test_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_dart.engine.config.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match="tree_attention='triton' needs Triton, which is not installed: pip install triton"
    ):
        EngineConfig(tree_attention="triton")
    with pytest.raises(ValueError, match="fused_heads writes for the kernel of tree_attention='triton'; set"):
        EngineConfig(fused_heads=True)
    with pytest.raises(ValueError, match="fused_layers multiplies what fuse joins and fused_heads attends to; set all"):
        EngineConfig(fused_layers=True, fuse=True)
    with pytest.raises(ValueError, match="tree_attention is True; give 'triton', 'flex' or None"):
        EngineConfig(tree_attention=True)  # type: ignore[arg-type]


def compiled_for_a_gpu(kernel: Any, kinds: dict[str, str], constants: dict[str, Any], stages: int, folder: Path) -> str:
    """What the assembler says of a kernel for an H200, arguments of `kinds` and else numbers; and its code."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    kinds = kinds | {name: "i32" for name in names if name not in kinds and name not in constants}
    signature = {name: kinds.get(name, "constexpr") for name in names}
    divisible = [place for place, name in enumerate(names) if kinds.get(name, "fp32") != "fp32"]
    aligned = {(place,): [["tt.divisibility", 16]] for place in divisible}
    source = ASTSource(kernel, signature, constants, aligned)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": stages})
    (folder / "kernel.ptx").write_text(made.asm["ptx"])
    ptxas = Path(sys.modules["triton"].__file__ or "").parent / "backends/nvidia/bin/ptxas"
    command = [ptxas, "-v", "--gpu-name=sm_90a", folder / "kernel.ptx", "-o", "/dev/null"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr + made.asm["ptx"]


@needs_triton
@pytest.mark.skipif(INTERPRETS, reason="nothing is compiled there")
@pytest.mark.parametrize(("splits", "windowed"), [(1, True), (8, False)])
def test_attention_compiles_for_a_gpu(splits: int, windowed: bool, tmp_path: Path) -> None:
    """At Qwen3-8B's shape: no register is spilled, and scores are products of the tensor cores."""
    from triton import language

    from hf_dart.engine.triton_kernels import attend_to_split

    constants: dict[str, Any] = {"KV": 8, "G": 4, "N": 64, "W": 1, "D": 128, "E": 128, "SPLITS": splits}
    constants |= {"BLOCK_Q": 64, "BLOCK_K": 64, "WIDTH": 128, "OUT_WIDTH": 128, "NODES": 64}
    constants |= {"WINDOWED": windowed, "ACC": language.float32, "PRECISION": "ieee"}
    kinds = {"Q": "*bf16", "K": "*bf16", "V": "*bf16", "WORDS": "*i64", "FIRST": "*i32", "LENGTHS": "*i64"}
    kinds |= {"PART": "*fp32", "PEAK": "*fp32", "DONE": "*i32", "OUT": "*bf16", "scale": "fp32"}
    told = compiled_for_a_gpu(attend_to_split, kinds, constants, 2, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in told
    assert re.search("wgmma.mma_async|mma.sync", told)
    assert ("atom.acq_rel.gpu" in told or "atom.global.gpu.acq_rel" in told) == (splits > 1)


@needs_triton
@pytest.mark.skipif(INTERPRETS, reason="nothing is compiled there")
@pytest.mark.parametrize(("size", "width", "gated"), [(4096, 6144, False), (4096, 12288, True), (12288, 4096, False)])
def test_product_compiles_for_a_gpu(size: int, width: int, gated: bool, tmp_path: Path) -> None:
    """The same of products of a layer of Qwen3-8B."""
    from triton import language

    from hf_dart.engine.triton_kernels import multiply

    constants: dict[str, Any] = {"IN": size, "WIDTH": width, "NORMED": size == 4096, "GATED": gated, "BIASED": False}
    constants |= {"ADDS": size == 12288, "BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64, "ACC": language.float32}
    kinds = dict.fromkeys(("X", "WEIGHT", "BIAS", "NORM", "ADDED", "OUT"), "*bf16") | {"eps": "fp32"}
    told = compiled_for_a_gpu(multiply, kinds, {**constants, "PRECISION": "ieee"}, 4, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in told
    assert re.search("wgmma.mma_async|mma.sync", told)
    assert "cp.async" in told  # weights are on their way while others are multiplied
