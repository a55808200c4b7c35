"""Published EAGLE-3 heads: logits as their own code gives them, text as stock gives it, and files read strictly."""

from __future__ import annotations

import json
import logging
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import GREEDY, SAMPLED, batch
from support.checkpoints import reordered, save
from support.compare import assert_identical, tally
from support.eagle3 import (
    JOINED,
    MODELOPT,
    ORIGINAL,
    PEAGLE,
    SPECULATORS,
    VARIANTS,
    eagle3_config,
    eagle3_tensors,
    forward,
    variant,
)
from support.heads import assert_saved, draft_after, features_of
from support.sentences import not_read
from support.tiny import prompts, tiny_target

from hf_dart import DartHead, EagleDrafter, LanguageModelDrafter, TreeConfig, load_drafter
from hf_dart.drafters.beams import BeamProposal

EXACT = tally("float64, published EAGLE-3 heads", least=1.3)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("llama", num_hidden_layers=8)


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    pickle = Path(folder, "pytorch_model.bin")
    return torch.load(pickle, weights_only=True) if pickle.exists() else load_file(Path(folder, "model.safetensors"))


@torch.no_grad()
@pytest.mark.parametrize("name", [*VARIANTS, *JOINED])
def test_logits_are_the_published_ones(
    target: Any, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hf_dart")
    folder = variant(tmp_path, target, name)
    drafter = load_drafter(folder, target=target)
    assert isinstance(drafter, EagleDrafter)
    assert "which EagleDrafter reads." in caplog.text
    speculators = "speculators" in name
    assert drafter.draft_length == (5 if speculators else 8)  # `EaModel` takes depth=7, and a first level before them
    drafter.beam = 3
    config = json.loads((tmp_path / "config.json").read_text())
    ids = prompts([9])["input_ids"]
    counted = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [1, 3, 4])  # L // 2 and L - 3
    counted = config.get("target_layer_ids", counted)
    taps = config.get("eagle_aux_hidden_state_layer_ids") or [tap + 1 for tap in counted]
    theirs = features_of(target, [8] if name in JOINED else taps, ids)[0]
    proposal = draft_after(target, drafter, ids, 4)
    assert isinstance(proposal, BeamProposal)
    columns = slice(None) if drafter.draft_vocabulary is None else drafter.draft_vocabulary
    weights, table = weights_of(folder), target.get_input_embeddings().weight
    weights.setdefault("lm_head.weight", target.lm_head.weight)
    for place, token in enumerate(proposal.branches[0, 0].tolist()):
        # After the first branches; deeper ones are looked at in test_eagle.
        logits = forward(config, weights, table, theirs, ids[0, 1:], [token]).log_softmax(-1)
        ours = torch.stack([proposal.logits[0, 0], proposal.conditional[0, 0, place]])[:, columns]
        torch.testing.assert_close(ours.double(), logits, rtol=0, atol=2e-6)


def test_draft_tokens_in_another_order(target: Any, tmp_path: Path) -> None:
    config = eagle3_config(target, draft_vocab_size=20)
    ascending = eagle3_tensors(config)
    files = {"ascending": ascending, "mixed": reordered(ascending, "lm_head.weight")}
    one, other = (load_drafter(save(tmp_path / name, config, files[name]), target=target) for name in files)
    assert all(torch.equal(weight, one.state_dict()[name]) for name, weight in other.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("name", PEAGLE)
def test_peagle_heads_are_dart_heads(target: Any, tmp_path: Path, name: str) -> None:
    folder = variant(tmp_path, target, name)
    head = load_drafter(folder, target=target)
    assert isinstance(head, DartHead)
    assert head.draft_length == 5
    config = json.loads((tmp_path / "config.json").read_text())
    ids = prompts([9])["input_ids"]
    theirs = features_of(target, config["eagle_aux_hidden_state_layer_ids"], ids)[0]
    ours = draft_after(target, head, ids).logits[0]
    table = target.get_input_embeddings().weight
    expected = forward(config, weights_of(folder), table, theirs, ids[0, 1:], [], masks=4)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    head.tree_config = TreeConfig(nodes=16)
    for mode in (GREEDY, SAMPLED):
        assert_identical(target, head, batch(4, "sdpa"), into=EXACT, **mode)
    assert_saved(head, target, tmp_path / "ours")


@pytest.mark.parametrize("name", ["EAGLE-1", "EAGLE-2, Qwen2's", "original, draft vocabulary", "original, yarn",
                                  "modelopt", "speculators, 0.9's defaults", "speculators, three layers",
                                  "speculators, own table"])  # fmt: skip
def test_text_is_stocks_and_saved_it_is_the_same_head(target: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    drafter = load_drafter(variant(tmp_path, target, name), target=target)
    assert drafter.config.origin_license == "mit"
    assert_saved(drafter, target, tmp_path / "ours")
    drafter.tree_config = TreeConfig(nodes=16)
    for mode in (GREEDY, SAMPLED):
        assert_identical(target, drafter, batch(4, "sdpa"), into=EXACT, **mode)


def test_the_targets_own_table_is_not_kept(target: Any, tmp_path: Path) -> None:
    folder = variant(tmp_path, target, "speculators, own table")
    weights = load_file(tmp_path / "model.safetensors")
    weights["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    save_file(weights, tmp_path / "model.safetensors")
    drafter = load_drafter(folder, target=target)
    assert drafter.embed_tokens is None
    assert drafter.config.embeddings == "table"
    assert "embed_tokens.weight" not in drafter.state_dict()


# ---- files that are damaged, hostile, of another kind or for another target -----------------------------------


def checkpoint(folder: Path, target: Any, style: str = ORIGINAL, pickled: bool = False, **changes: Any) -> Path:
    """With the weights of the unchanged config."""
    form, own = PEAGLE.get(style, (style, {}))
    tensors = eagle3_tensors(eagle3_config(target, form, **own))
    save(folder, eagle3_config(target, form, **{**own, **changes}), tensors, pickled=pickled)
    return folder


def load(folder: Path, target: Any) -> EagleDrafter:
    return load_drafter(str(folder), target=target)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "layers of Gemma 4": (ORIGINAL, {"architectures": ["Gemma4Eagle3Model"]}, "an EAGLE-3 head with layers of Gemma 4"),
    "latent attention": (ORIGINAL, {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "with latent attention"),
    "SpecForge's P-EAGLE": (ORIGINAL, {"architectures": ["PEagleDraftModel"]}, "a P-EAGLE head of SpecForge, whose"),
    "another activation": (ORIGINAL, {"hidden_act": "gelu"}, "hidden_act"),
    "an unknown field": (ORIGINAL, {"logit_scale": 0.5}, "logit_scale"),
    "quantized": (ORIGINAL, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "no vocabulary": (ORIGINAL, {"vocab_size": None}, "vocab_size"),
    "more scored than there are": (ORIGINAL, {"draft_vocab_size": 49}, "draft_vocab_size"),
    "more heads than rows": (ORIGINAL, {"num_attention_heads": 3}, "num_attention_heads"),
    "a width beyond all memory": (ORIGINAL, {"hidden_size": 2**19}, "hidden size 524288"),
    "an MLP beyond all memory": (ORIGINAL, {"intermediate_size": 2**23}, "shape"),
    "an unknown rotation": (ORIGINAL, {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type"),
    "a rotation of some dimensions": (
        SPECULATORS, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"
    ),
    "a norm that is not there": (ORIGINAL, {"norm_before_fc": True}, "input_norm.weight"),
    "two kinds of norm": (ORIGINAL, {"norm_before_fc": True, "fc_norm": True}, "fc_norm"),
    "biases that are not there": (ORIGINAL, {"attention_bias": True}, "attention_bias"),
    "a norm as a number": (ORIGINAL, {"norm_output": 1}, "norm_output"),
    "another tapped width": (ORIGINAL, {"target_hidden_size": 16}, "hidden size 16"),
    "a vocabulary of another size": (ORIGINAL, {"vocab_size": 64, "draft_vocab_size": 48}, "64 rows"),
    "an EAGLE-1 head": (MODELOPT, {"eagle_config__use_aux_hidden_state": False}, "use_aux_hidden_state"),
    "Medusa's heads": (MODELOPT, {"eagle_config__parallel_draft_step": 4}, "parallel_draft_step"),
    "an unknown field inside": (MODELOPT, {"eagle_config__gate": True}, "gate"),
    "a tap after the target": (MODELOPT, {"eagle_config__eagle_aux_hidden_state_layer_ids": [0, 1, 7]}, "layer_ids"),
    "taps counted in two ways": (MODELOPT, {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "contradicts"),
    "a tap twice": (SPECULATORS, {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "layer_ids"),
    "the last tap": (SPECULATORS, {"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}, "layer_ids"),
    "a tap too many": (SPECULATORS, {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}, "fc.weight"),
    "another backbone": (SPECULATORS, {"model_type": "mixtral"}, "model_type"),
    "a layer too many": (SPECULATORS, {"num_hidden_layers": 2}, "layers.1"),
    "layers beyond all memory": (SPECULATORS, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "an unknown field of the layer": (SPECULATORS, {"transformer_layer_config__num_experts": 4}, "num_experts"),
    "a layer of another type": (SPECULATORS, {"rope_parameters": [1]}, "rope_parameters"),
    "a window without a size": (SPECULATORS, {"layer_types": ["sliding_attention"]}, "sliding_window"),
    "another algorithm": (SPECULATORS, {"speculators_config__algorithm": "eagle9"}, "algorithm"),
    "no mask token": ("peagle", {"mask_token_id": None}, "mask_token_id"),
    "a mask token beyond the vocabulary": ("peagle", {"mask_token_id": 48}, "mask_token_id"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_a_config_must_not_say(target: Any, tmp_path: Path, name: str) -> None:
    style, changes, words = WRONG[name]
    not_read(lambda: load(checkpoint(tmp_path, target, style, **changes), target), words)


TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"norm.weight": None}, "norm.weight"),
    "unknown": ({"midlayer.gate.weight": torch.zeros(2, 2)}, "midlayer.gate.weight"),
    "of another shape": ({"fc.weight": torch.zeros(4, 4)}, "fc.weight"),
    "of another rank": ({"norm.weight": torch.zeros(32, 1)}, "norm.weight"),
    "no number with a point": ({"norm.weight": torch.zeros(32, dtype=torch.int64)}, "I64"),
    "a token beyond the vocabulary": ({"d2t": torch.full((20,), 40)}, "beyond the vocabulary"),
    "a token below 0": ({"d2t": torch.full((20,), -5)}, "beyond the vocabulary"),
    "a token twice": ({"d2t": -torch.arange(20) + 3}, "twice"),
    "other tokens marked": ({"d2t": torch.arange(20)}, "different tokens"),
    "no d2t": ({"d2t": None}, "d2t"),
    "d2t in floats": ({"d2t": torch.zeros(20)}, "F32"),
}


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_what_the_weights_must_not_be(target: Any, tmp_path: Path, name: str, pickled: bool) -> None:
    changes, words = TENSORS[name]
    config = eagle3_config(target, draft_vocab_size=20)
    tensors = {**eagle3_tensors(config), **changes}
    tensors = {key: value for key, value in tensors.items() if value is not None}
    save(tmp_path, config, tensors, pickled=pickled)
    not_read(lambda: load(tmp_path, target), words)


class Hostile:
    """Runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.mark),)

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)


def test_pickles_that_are_not_opened(target: Any, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a", target, pickled=True)
    load(folder, target)
    file, mark = folder / "pytorch_model.bin", tmp_path / "mark"
    good = torch.load(file, weights_only=True)
    bad: dict[str, Any] = {
        "code": {**good, "x": Hostile(mark)},
        "bytes": {**good, "x": bytearray(10)},
        "numbers": {**good, "x": 3},
        "a list": list(good.values()),
        "names that are none": {**good, 7: good["fc.weight"]},
        "sparse": {**good, "fc.weight": good["fc.weight"].to_sparse()},
        "a view of one number": {**good, "fc.weight": torch.zeros(1, dtype=torch.float64).expand(32, 96)},
        "a module": torch.nn.Linear(2, 2),
    }
    for name, content in bad.items():
        torch.save(content, file)
        not_read(lambda: load(folder, target), "pytorch_model.bin")
        assert not mark.exists(), name
    file.write_bytes(pickle.dumps({"x": Hostile(mark)}))
    not_read(lambda: load(folder, target), "damaged")
    torch.save(good, file, _use_new_zipfile_serialization=False)
    not_read(lambda: load(folder, target), "damaged")
    torch.save(good, file)
    with zipfile.ZipFile(file) as archive:
        parts = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    for how, more, words in (
        (zipfile.ZIP_DEFLATED, 0, "as torch.save writes them"), (zipfile.ZIP_STORED, 2**25, "more than tensors")
    ):  # fmt: skip
        with zipfile.ZipFile(file, "w", how) as archive:
            for name, part in parts.items():
                archive.writestr(name, part + b"." * (more * name.endswith("data.pkl")))
        not_read(lambda: load(folder, target), words)
    assert not mark.exists()


def test_huge_headers(target: Any, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, target)
    file = folder / "model.safetensors"
    for size in (2**63, 2**40, 10**9):
        file.write_bytes(size.to_bytes(8, "little") + b"{}")
        not_read(lambda: load(folder, target), "damaged")
    header = json.dumps({"fc.weight": {"dtype": "F64", "shape": [2**40, 2**20], "data_offsets": [0, 2**63]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    not_read(lambda: load(folder, target), "damaged")


def test_it_needs_a_target(target: Any, tmp_path: Path) -> None:
    not_read(lambda: EagleDrafter.from_pretrained(str(checkpoint(tmp_path, target))), "pass target=")
    shallow = tiny_target("llama", num_hidden_layers=2)
    not_read(lambda: load(tmp_path, shallow), "too small")
    wide = tiny_target("llama", num_hidden_layers=8, hidden_size=64)
    not_read(lambda: load(tmp_path, wide), "64")


def test_two_names_of_a_norm(target: Any, tmp_path: Path) -> None:
    config = eagle3_config(target, SPECULATORS, num_hidden_layers=2)
    tensors = eagle3_tensors(config)
    tensors["layers.1.hidden_norm.weight"] = tensors.pop("layers.1.input_layernorm.weight")
    save(tmp_path, config, tensors)
    assert len(load(tmp_path, target).deeper) == 1
    tensors["layers.1.input_layernorm.weight"] = tensors["layers.1.hidden_norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    not_read(lambda: load(tmp_path, target), "input_layernorm and a hidden_norm")


JOINED_WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "layers that are not there": ({"num_hidden_layers": 2}, {}, "layers.1"),
    "another fusion": ({}, {"fc.weight": torch.zeros(32, 96)}, "fc.weight"),
    "a table of another size": ({}, {"embed_tokens.weight": torch.zeros(40, 32)}, "embed_tokens.weight"),
}


@pytest.mark.parametrize("name", JOINED_WRONG)
def test_what_is_no_eagle1_head(target: Any, tmp_path: Path, name: str) -> None:
    fields, tensors, words = JOINED_WRONG[name]
    folder = variant(tmp_path, target, "EAGLE-1")
    config = json.loads((tmp_path / "config.json").read_text())
    weights = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    save(tmp_path, {**config, **fields}, {**weights, **tensors}, pickled=True)
    not_read(lambda: load_drafter(folder, target=target), words)
    not_read(lambda: load_drafter(folder), "pass target=")
    tiny_target("llama", num_hidden_layers=1).save_pretrained(tmp_path / "no head")
    assert isinstance(load_drafter(str(tmp_path / "no head"), target=target), LanguageModelDrafter)
