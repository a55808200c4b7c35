"""The head: its draft cache, its files, what it leaves alone."""

from __future__ import annotations

import random
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.compare import assert_identical, run
from support.tiny import prompts, tiny_head, tiny_target

from hf_dart import DartConfig, DartHead
from hf_dart.decoding.api import attach, detach
from hf_dart.models.trial import check_verification

GREEDY = {"do_sample": False, "max_new_tokens": 16}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture
def target() -> Any:
    return tiny_target("qwen3")


# ---- files ------------------------------------------------------------------------------------------------


def test_save_and_load(target: Any, tmp_path: Path) -> None:
    head = tiny_head(target, num_layers=2)
    head.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir() if path.is_file()} <= {".safetensors", ".json"}
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        keys = set(file.keys())
        stored = sum(file.get_tensor(key).numel() for key in keys)
    assert keys == {name for name, _ in head.named_parameters()}
    assert not any("embed_tokens" in key or "lm_head" in key for key in keys)
    assert (tmp_path / "model.safetensors").stat().st_size < stored * 8 + 8192

    loaded = DartHead.from_pretrained(str(tmp_path), target=target)
    assert not loaded.training
    for (name, left), (_, right) in zip(head.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(left, right), name
    for field in DartConfig.for_target(target).to_dict():
        if field not in ("transformers_version", "architectures", "dtype", "_name_or_path"):
            assert getattr(loaded.config, field, None) == getattr(head.config, field, None), field


def test_loads_as_a_path_object_and_without_a_target(target: Any, tmp_path: Path) -> None:
    tiny_head(target).save_pretrained(tmp_path)
    head = DartHead.from_pretrained(tmp_path)
    attach(target)
    with pytest.raises(ValueError, match="no target"):
        target.generate(**prompts([7]), **GREEDY, assistant=head)
    head.bind(target).to(torch.float64)
    assert_identical(target, head, prompts([7]), **GREEDY)


def test_fields_that_differ_by_layer() -> None:
    """Gemma 4 has wider and fewer keys where it sees all."""
    target = tiny_target("gemma4")
    config = DartConfig.for_target(target)
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta) == (16, 2, 1e6)
    # As in families whose layers that see all have no positions.
    target.config.rope_parameters = {**target.config.rope_parameters, "full_attention": None}
    assert DartConfig.for_target(target).rope_theta == 1e4


def test_shares_the_targets_modules(target: Any) -> None:
    head = tiny_head(target)
    embeddings, lm_head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    lent = {embeddings.data_ptr(), lm_head.data_ptr()}
    assert not lent & {tensor.data_ptr() for tensor in head.state_dict().values()}
    assert {head.shared.embeddings.weight.data_ptr(), head.shared.lm_head.weight.data_ptr()} == lent
    assert torch.equal(head.embed(torch.tensor([3, 5])), embeddings[[3, 5]])
    # The head does not move or convert what it was lent.
    head.to(torch.float32)
    assert target.get_output_embeddings().weight.dtype == torch.float64
    assert "assistant" not in target.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_takes_the_targets_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    target = tiny_target("llama", dtype=dtype)
    made = tiny_head(target)
    made.save_pretrained(tmp_path)
    loaded = DartHead.from_pretrained(str(tmp_path), target=target)
    for head in (made, loaded):
        assert {parameter.dtype for parameter in head.parameters()} == {dtype}
        target.generate(**prompts([7]), **GREEDY, assistant=head)
        assert head.last_stats is not None
    other = tiny_target("llama", dtype=torch.bfloat16)
    assert DartHead.from_pretrained(str(tmp_path), target=other).dtype == torch.bfloat16


def test_low_precision_head_on_a_float64_target(tmp_path: Path) -> None:
    target = tiny_target("llama")
    tiny_head(target).save_pretrained(tmp_path)
    head = DartHead.from_pretrained(str(tmp_path), target=target, dtype=torch.float32)
    assert head.dtype == torch.float32
    assert_identical(target, head, prompts([7, 3, 5, 9]), do_sample=True, top_k=0, max_new_tokens=16)


# ---- generators, devices, threads -------------------------------------------------------------------------


def generators() -> tuple[bytes, Any, Any]:
    kind, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), (kind, keys.tobytes(), *rest)


def test_making_and_loading_move_no_generator(target: Any, tmp_path: Path) -> None:
    torch.manual_seed(17)
    random.seed(17)
    np.random.seed(17)
    before = generators()
    head = DartHead.from_target(target)
    assert generators() == before, "from_target"
    head.save_pretrained(tmp_path)
    DartHead.from_pretrained(str(tmp_path), target=target)
    assert generators() == before, "from_pretrained"
    detach(target)
    attach(target)
    assert generators() == before, "attach"
    fresh = tiny_target("gemma3")
    check_verification(fresh)
    assert generators() == before, "check_verification"
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated"):
        DartHead.from_pretrained(str(tmp_path), target=target)
    assert generators() == before, "a failed load"
    with pytest.raises(ValueError, match="hidden size"):
        head.bind(tiny_target("qwen3", hidden_size=64))
    target.generate(**prompts([7]), **GREEDY, assistant=head)
    assert generators() == before, "greedy drafting"


def test_from_target_is_reproducible(target: Any) -> None:
    torch.manual_seed(1)
    left = tiny_head(target)
    torch.manual_seed(2)
    right, other = tiny_head(target), tiny_head(target, seed=1)
    assert torch.equal(left.fc.weight, right.fc.weight)
    assert not torch.equal(left.fc.weight, other.fc.weight)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_target_dispatched_by_accelerate(where: str, tmp_path: Path) -> None:
    """Modules split by a device map: hooks move what passes between them."""
    from accelerate import dispatch_model

    whole = tiny_target("llama", dtype=torch.float32)
    split = tiny_target("llama", dtype=torch.float32)
    device_map = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": where,
        "model.norm": "cpu",
        "lm_head": "cpu",
    }
    split = dispatch_model(split, device_map=device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    head = tiny_head(split)
    inputs = prompts([7])
    for options in (GREEDY, {"do_sample": True, "top_k": 0, "max_new_tokens": 16}):
        wanted = run(whole, inputs, 0, **options)
        assert torch.equal(run(split, inputs, 0, **options).sequences, wanted.sequences)
        ours = run(split, inputs, 0, assistant=head, **options)
        assert torch.equal(ours.sequences, wanted.sequences)
        assert torch.equal(ours.state, wanted.state)


def test_two_threads_use_one_head(target: Any) -> None:
    head = tiny_head(target)
    cases = [prompts([7, 4]), prompts([11])]
    options = {**GREEDY, "max_new_tokens": 60}
    alone = [target.generate(**inputs, **options, assistant=head) for inputs in cases]
    together: list[Any] = [None, None]

    def work(index: int) -> None:
        for _ in range(2):
            together[index] = target.generate(**cases[index], **options, assistant=head)

    threads = [Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(left, right) for left, right in zip(alone, together, strict=True))
