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
from support.tiny import VOCABULARY, prompts, tiny_head, tiny_target
from torch import Tensor

from hf_dart import DartConfig, DartHead
from hf_dart.decoding.api import attach, detach
from hf_dart.models.trial import check_verification

GREEDY = {"do_sample": False, "max_new_tokens": 16}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture
def target() -> Any:
    return tiny_target("qwen3")


def from_scratch(head: DartHead, features: Tensor, tokens: Tensor) -> Tensor:
    """Draft logits [d, V] after T positions, by the training pass over all of them and d - 1 slots."""
    real, slots = features.shape[0], head.draft_length - 1
    causal = torch.ones(real + slots, real + slots, dtype=torch.bool).tril()
    hidden = head(features[None], head.embed(tokens)[None], torch.arange(real + slots)[None], causal[None, None])
    return head.logits(hidden)[0, real - 1 :]


@torch.no_grad()
@pytest.mark.parametrize("draft_length", [1, 2, 6])
@pytest.mark.parametrize(
    "shape",
    [
        {"num_layers": 1, "feature_layers": [1]},
        {"num_layers": 2, "feature_layers": [0, 1, 2]},
        {"num_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 1},
        {"num_layers": 3, "num_key_value_heads": 4, "head_dim": 4, "feature_layers": [2]},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 3])
def test_draft_cache(target: Any, shape: dict[str, Any], draft_length: int, batch: int) -> None:
    """Ragged extends and proposes, over many rounds, equal one pass from scratch for every row."""
    head = tiny_head(target, draft_length=draft_length, **shape)
    width = head.config.features_width
    generator = torch.Generator().manual_seed(1)
    choose = random.Random(batch)
    state = head.begin(batch, 2)  # too small: it has to grow
    features: list[Tensor] = [torch.zeros(0, width, dtype=torch.float64) for _ in range(batch)]
    tokens: list[Tensor] = [torch.zeros(0, dtype=torch.long) for _ in range(batch)]
    for turn in range(14):
        counts = [choose.choice([0, 1, 2, 5]) if batch > 1 else choose.choice([1, 2, 5]) for _ in range(batch)]
        if turn == 0:
            counts = [max(count, 1) for count in counts]
        longest = max(1, *counts) if batch > 1 else counts[0]
        new = torch.randn(batch, longest, width, generator=generator, dtype=torch.float64)
        behind = torch.randint(VOCABULARY, (batch, longest), generator=generator)
        for row, count in enumerate(counts):
            features[row] = torch.cat([features[row], new[row, :count]])
            tokens[row] = torch.cat([tokens[row], behind[row, :count]])
            # What stands after a row's count must not be looked at.
            new[row, count:] = float("nan") if turn % 2 else 1e6
        if turn % 3 == 0:
            head.extend(state, new.nan_to_num(7.0), behind, torch.tensor(counts))
            continue
        proposal = head.propose(state, new.nan_to_num(7.0), behind, torch.tensor(counts))
        assert proposal.logits.shape == (batch, draft_length, VOCABULARY)
        assert proposal.hidden.shape == (batch, draft_length, head.config.hidden_size)
        assert state.lengths.tolist() == [len(row) for row in tokens]
        for row, count in enumerate(counts):
            if count:  # a row without news keeps its older draft
                torch.testing.assert_close(
                    proposal.logits[row], from_scratch(head, features[row], tokens[row]), **CLOSE
                )


@torch.no_grad()
def test_rows_are_independent(target: Any) -> None:
    head = tiny_head(target)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(3, 6, head.config.features_width, generator=generator, dtype=torch.float64)
    tokens = torch.randint(VOCABULARY, (3, 6), generator=generator)
    counts = torch.tensor([6, 3, 1])
    together = head.propose(head.begin(3, 6), features, tokens, counts)
    other = features.clone()
    other[0] += 1
    changed = head.propose(head.begin(3, 6), other, tokens, counts)
    assert not torch.equal(changed.logits[0], together.logits[0])
    assert torch.equal(changed.logits[1:], together.logits[1:])
    for row, count in enumerate(counts.tolist()):
        alone = head.propose(
            head.begin(1, 6), features[row : row + 1, :count], tokens[row : row + 1, :count], counts[row : row + 1]
        )
        torch.testing.assert_close(alone.logits[0], together.logits[row], **CLOSE)


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
    drafts = []
    for each in (head, loaded):
        assert_identical(target, each, prompts([7]), **GREEDY)
        drafts.append(each.last_stats.to_dict() | {"seconds": None})
    assert drafts[0] == drafts[1]


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
