"""Published DFlash drafters: logits as their code gives them, text as stock gives it, and files read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_tensors
from safetensors.torch import save_file
from support.checkpoints import save
from support.compare import assert_identical
from support.guests import dflash_checkpoint, dflash_config, dflash_drafter, dflash_tensors, published
from support.heads import draft_after, features_of
from support.hub import Hub, Repository, sha256
from support.hub import hub as hub
from support.sentences import not_read
from support.tiny import prompts, tiny_target
from support.users import letters

from hf_dart import DFlashDrafter, TreeConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
# Everything that a published config may say about the pass.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "inner block size": {"block_size": None, "dflash_config__block_size": 4},
    "rope_parameters": {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}},
    "yarn": {"rope_theta": None, "rope_parameters": YARN},
    "llama3": {"rope_theta": 10000, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
    "sliding": SLIDING,
    "sliding, both directions": {**SLIDING, "is_causal": False},
    "causal": {"dflash_config__causal": True},
    "sliding by depth": {"layer_types": None, "sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1},
    "scales": {
        "dflash_config__input_embedding_scale": 3.0,
        "dflash_config__output_multiplier": 0.2,
        "final_logit_softcapping": 2.0,
    },
    "biases": {"attention_bias": True},
    "taps out of order": {"dflash_config__target_layer_ids": [1, 0]},
    "gelu": {"hidden_act": "gelu"},
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_published_forward(target: Any, tmp_path: Path, variant: str) -> None:
    drafter = dflash_drafter(tmp_path, target, **VARIANTS[variant])
    config = dflash_config(target, **VARIANTS[variant])
    inner = config["dflash_config"]
    tokens = prompts([12])["input_ids"]
    features = features_of(target, drafter.feature_layers, tokens)
    size = inner.get("block_size", config.get("block_size"))
    block = torch.cat([tokens[0, -1:], tokens.new_full((size - 1,), inner["mask_token_id"])])
    embedded = target.get_input_embeddings().weight[block] * inner.get("input_embedding_scale", 1.0)
    hidden = published(config, dflash_tensors(config), features[0], embedded)
    expected = hidden[1:] @ target.get_output_embeddings().weight.T * inner.get("output_multiplier", 1.0)
    if cap := config.get("final_logit_softcapping"):
        expected = cap * torch.tanh(expected / cap)
    ours = draft_after(target, drafter, tokens).logits[0]
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    before = drafter._frequencies.clone()
    assert torch.equal(drafter.bfloat16()._frequencies, before), "they are not rounded with the weights"


# ---- files that are damaged, hostile, of another kind or for another target -----------------------------------


GREEDY = {"do_sample": False, "max_new_tokens": 16}


def load(path: Path | str, target: Any, **options: Any) -> DFlashDrafter:
    return DFlashDrafter.from_pretrained(str(path), target=target, **options)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "DFlash2 without its weights": ({"architectures": ["DFlash2DraftModel"]}, "candidate_selector"),
    "DFlash with parts of DFlash2": ({"dflash_config__selector_rank": 256}, "selector_rank"),
    "DSpark without its weights": ({"architectures": ["DSparkDraftModel"]}, "markov_head"),
    "another architecture": ({"architectures": ["DFlashDominoModel"]}, "DFlashDominoModel"),
    "a state along the path": (
        {"architectures": ["Qwen3DSparkModel"], "markov_rank": 4, "markov_head_type": "rnn"}, "markov_head_type"
    ),
    "groups that do not fit": (
        {"architectures": ["DFlash2DraftModel"], "dflash_config__conv_group_size": 7}, "conv_group_size"
    ),
    "an adapter between widths": ({"dflash_config__target_hidden_size": 64}, "target_hidden_size"),
    "no architecture": ({"architectures": None}, "no config.json of a DFlash drafter"),
    "another backbone": ({"model_type": "llama"}, 'model_type: "llama"'),
    "domino": ({"dflash_config__projector_type": "domino"}, "projector_type"),
    "latent attention": ({"dflash_config__attention_mode": "mla"}, "attention_mode"),
    "an unknown field inside": ({"dflash_config__use_swa": True}, "use_swa"),
    "a mask token beyond the vocabulary": ({"dflash_config__mask_token_id": 48}, "mask_token_id"),
    "no mask token": ({"dflash_config__mask_token_id": None}, "mask_token_id"),
    "no taps": ({"dflash_config__target_layer_ids": None}, "target_layer_ids"),
    "a tap twice": ({"dflash_config__target_layer_ids": [1, 1]}, "target_layer_ids"),
    "a tap after the last layer": ({"dflash_config__target_layer_ids": [0, 2]}, "target_layer_ids"),
    "two block sizes": ({"dflash_config__block_size": 8}, "contradicts"),
    "two mask tokens": ({"mask_token_id": 3}, "contradicts"),
    "causal and not": ({"is_causal": False, "dflash_config__causal": True}, "contradicts"),
    "causal as a number": ({"is_causal": 1}, "causal"),
    "a block of one": ({"block_size": 1}, "block_size"),
    "two thetas": ({"rope_scaling": None, "rope_parameters": {"rope_theta": 5.0}}, "contradicts"),
    "rotations that change with the length": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
    "a layer too many": ({"num_hidden_layers": 3}, "layer_types"),
    "heads that do not share": ({"num_key_value_heads": 3}, "multiple"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_a_config_must_not_say(target: Any, tmp_path: Path, name: str) -> None:
    changes, words = WRONG[name]
    save(tmp_path, dflash_config(target, **changes), dflash_tensors(dflash_config(target)))
    not_read(lambda: load(tmp_path, target), words)


def test_files_that_are_not_there(target: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, words in ((tmp_path / "nowhere", "no folder"), (tmp_path / "empty", "no config.json")):
        not_read(lambda folder=folder: load(folder, target), words)
    path = Path(dflash_checkpoint(tmp_path / "one", target))
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    not_read(lambda: load(path, target), "safetensors")
    index = path / "model.safetensors.index.json"
    for content, words in (('{"weight_map": {"norm.weight": "b.safetensors"}}', "lacks a file"), ("[]", "JSON")):
        index.write_text(content)
        not_read(lambda words=words: load(path, target), words)


def test_a_tensor_in_two_shards(target: Any, tmp_path: Path) -> None:
    config = dflash_config(target)
    tensors = dflash_tensors(config)
    save(tmp_path, config, tensors)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    save_file({"norm.weight": torch.zeros(32)}, tmp_path / "b.safetensors")
    index = {"weight_map": {**dict.fromkeys(tensors, "a.safetensors"), "norm.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    not_read(lambda: load(tmp_path, target), "twice")


OTHERS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "hidden size": ({}, {"hidden_size": 64}),
    "number of layers": ({}, {"num_hidden_layers": 3}),
    "reads layer 2": ({"num_target_layers": None}, {"num_hidden_layers": 1}),
    "embedding table": ({}, {"vocab_size": 64}),
}


@pytest.mark.parametrize("words", OTHERS)
def test_a_drafter_of_another_target(target: Any, tmp_path: Path, words: str) -> None:
    changes, changed_target = OTHERS[words]
    path = dflash_checkpoint(tmp_path, target, **changes)
    other = tiny_target("qwen3", **changed_target)
    not_read(lambda: load(path, other), words)
    assert "generate" not in vars(other)
    drafter = load(path, target)
    not_read(lambda: other.generate(**prompts([5]), **GREEDY, custom_generate=drafter.generate), words)
    drafter.tree_config = TreeConfig(nodes=8)
    assert_identical(target, drafter, prompts([7]), **GREEDY)


def test_a_mask_token_in_use(target: Any, tmp_path: Path) -> None:
    path = dflash_checkpoint(tmp_path, target, dflash_config__mask_token_id=7)
    not_read(lambda: load(path, target, tokenizer=letters("abcdefgh")), "'h'")
    assert load(path, target, tokenizer=letters("abcdefg")).shape.mask_token_id == 7
    added = letters("abcdefg")
    added.add_special_tokens({"mask_token": "<|MASK|>"})
    assert added.convert_tokens_to_ids("<|MASK|>") == 7
    assert load(path, target, tokenizer=added).shape.mask_token_id == 7


def test_from_the_hub(target: Any, tmp_path: Path, hub: Hub) -> None:
    """Config and shards are fetched, and nothing else; least of all the code that lies beside them."""
    config = dflash_config(target)
    tensors = dflash_tensors(config)
    path = Path(save(tmp_path / "here", config, tensors))
    shards = {"a.safetensors": [*tensors][:5], "b.safetensors": [*tensors][5:]}
    index = {"weight_map": {name: shard for shard, names in shards.items() for name in names}}
    files = {
        "config.json": (path / "config.json").read_bytes(),
        **{shard: save_tensors({name: tensors[name] for name in names}) for shard, names in shards.items()},
        "model.safetensors.index.json": json.dumps(index).encode(),
        "dflash.py": b"raise SystemExit",
    }
    hub.objects |= {sha256(files[shard]): files[shard] for shard in shards}  # large files lie elsewhere
    hub.repositories["lab/dflash"] = Repository()
    hub.repositories["lab/dflash"].commit("main", None, files, "all")
    drafter = DFlashDrafter.from_pretrained("lab/dflash", target=target)
    local = DFlashDrafter.from_pretrained(str(path), target=target)
    assert all(torch.equal(drafter.state_dict()[name], tensor) for name, tensor in local.state_dict().items())
    assert not any("dflash.py" in request for request in hub.requests)
    not_read(lambda: DFlashDrafter.from_pretrained("lab/nothing", target=target), "no repository")
