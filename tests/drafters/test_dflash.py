"""Published DFlash drafters and relatives (JetSpec, DFlash2, DSpark): logits, text, and files read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_tensors
from support.cases import GREEDY, SAMPLED, batch
from support.checkpoints import reordered, save
from support.compare import assert_identical, tally
from support.guests import dflash_checkpoint, dflash_config, dflash_tensors, published
from support.heads import assert_beam, assert_saved, draft_after, features_of
from support.hub import Hub, Repository, sha256
from support.hub import hub as hub
from support.relatives import PATHS, VARIANTS, pair_score, path_score, relative, relative_config, relative_tensors
from support.sentences import not_read, refused
from support.tiny import prompts, tiny_target

from hf_dart import DFlashDrafter, TreeConfig, load_drafter
from hf_dart.trees.vocabulary import spread

EXACT = tally("float64, DFlash and its relatives", least=1.3)


@pytest.fixture(scope="module")
def deep() -> Any:
    return tiny_target("qwen3", num_hidden_layers=8)


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_the_published_ones(deep: Any, tmp_path: Path, name: str) -> None:
    drafter = load_drafter(relative(tmp_path, deep, name), target=deep)
    assert isinstance(drafter, DFlashDrafter)
    config = relative_config(deep, name)
    weights = relative_tensors(config, name)
    kind = VARIANTS[name][1]
    ids, inner = prompts([12])["input_ids"], config.get("dflash_config", {})
    taps = [tap + 1 for tap in inner.get("target_layer_ids", [1, 5])]  # -1 are the embeddings
    assert drafter.feature_layers == config.get("aux_hidden_state_layer_ids", taps)
    features, proposal = features_of(deep, drafter.feature_layers, ids), draft_after(deep, drafter, ids)
    size = inner.get("block_size", config.get("block_size"))
    known = {**config, **inner}
    fills_in = {known.get(name) for name in ("sample_from_anchor", "query_zero_predicts_next", "shift_label")} - {None}
    first = int(not fills_in.pop() if fills_in else kind != "dspark" or "speculators_model_type" in known)
    block = torch.cat([ids[0, -1:], torch.full((size - 1,), 47)])
    if config.get("sliding_window_non_causal"):
        config["is_causal"] = False
    embedded = deep.get_input_embeddings()(block) * inner.get("input_embedding_scale", 1.0)
    hidden = published(config, weights, features[0], embedded)[first:]
    assert len(hidden) == drafter.draft_length
    logits = hidden @ weights.get("lm_head.weight", deep.lm_head.weight).T * inner.get("output_multiplier", 1.0)
    if cap := config.get("final_logit_softcapping"):
        logits = cap * torch.tanh(logits / cap)
    if name in PATHS:
        table, root, plain = deep.get_input_embeddings().weight, int(ids[0, -1]), known.get("pure_draft_prefix_len", 0)

        def after(path: list[int]) -> torch.Tensor:
            scored = logits[len(path)] + path_score(weights, hidden, [root, *path], table, plain)
            return spread(scored.float(), drafter.draft_vocabulary, 48).log_softmax(-1)

        assert proposal.branches.shape[-1] == drafter.beam
        assert_beam(proposal, 0, after)
        return
    torch.testing.assert_close(proposal.logits[0], logits, rtol=1e-6, atol=1e-6)
    candidates = torch.stack([ids[0, :4]] * len(hidden))[None]
    if drafter.draft_vocabulary is not None:
        candidates = drafter.draft_vocabulary[candidates.clamp(max=19)]
    scores = torch.zeros(candidates.shape, dtype=torch.float64)
    table = drafter.transitions(proposal, ids[:, -1], candidates, scores)
    if kind == "dflash" or known.get("markov_rank") == 0:
        assert table is None
        return
    assert table is not None
    root = int(ids[0, -1])
    for depth in range(len(hidden)):
        for place, previous in enumerate(candidates[0, depth - 1].tolist() if depth else [root] * 4):
            added = torch.stack([
                pair_score(weights, hidden[depth], previous, column)
                for column in (candidates[0, depth].tolist() if drafter.draft_vocabulary is None
                               else torch.searchsorted(drafter.draft_vocabulary, candidates[0, depth]).tolist())
            ])  # fmt: skip
            expected = added.log_softmax(-1) + torch.tensor(4.0).log()
            torch.testing.assert_close(table[0, depth, place].double(), expected, rtol=1e-5, atol=1e-5)


PER_TOKEN = {
    "speculators' DFlash2, some tokens": "candidate_selector.successor_codebook",
    "speculators' DSpark": "markov_head.markov_w2.weight",
}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_draft_tokens_in_another_order(deep: Any, tmp_path: Path, name: str) -> None:
    files = {"ascending": dict, "mixed": lambda tensors: reordered(tensors, "lm_head.weight", PER_TOKEN[name])}
    one, other = (
        load_drafter(relative(tmp_path / order, deep, name, change=change), target=deep)
        for order, change in files.items()
    )
    assert all(torch.equal(weight, one.state_dict()[key]) for key, weight in other.state_dict().items())


@pytest.mark.parametrize("name", ["JetSpec", "DFlash2", "DSpark, gated", "speculators' DSpark", *PATHS])
def test_text_is_stocks(deep: Any, tmp_path: Path, name: str) -> None:
    drafter = load_drafter(relative(tmp_path, deep, name), target=deep)
    drafter.tree_config = TreeConfig(nodes=16)
    for mode in (GREEDY, SAMPLED):
        assert_identical(deep, drafter, batch(4, "sdpa"), into=EXACT, **mode)


@pytest.mark.parametrize("name", ["DFlash2", "speculators' DSpark", "Domino, fills in", "DFlash, DeepSeek's"])
def test_saved_in_our_format(deep: Any, tmp_path: Path, name: str) -> None:
    first = load_drafter(relative(tmp_path / "theirs", deep, name), target=deep)
    assert_saved(first, deep, tmp_path / "ours")
    content = json.loads((tmp_path / "ours" / "config.json").read_text())
    (tmp_path / "ours" / "config.json").write_text(json.dumps({**content, "published": {"model_type": "dart_dflash"}}))
    refused(lambda: load_drafter(str(tmp_path / "ours"), target=deep), ValueError, "architectures")


def test_what_is_refused_by_its_name(deep: Any, tmp_path: Path) -> None:
    """Speculators names a last layer before its norm; in z-lab's format drafters read it after the norm."""
    xpress, speculators = {"xpress_rank": 4}, "speculators' DFlash"
    for name, changes, words in (
        (speculators, {"aux_hidden_state_layer_ids": [2, 4, 8]}, "reads the last of 8 layers of its target before the"),
        (speculators, {**xpress, "speculators_model_type": "xpress", "architectures": ["XPress"]}, "an XPress"),
        ("JetSpec", {**xpress, "architectures": ["Qwen3XPressModel"]}, "This is an XPress drafter"),
        ("DSpark", {"architectures": ["Gemma4DSparkModel"]}, "DSpark drafter with layers of Gemma 4"),
        ("DFlash", {"architectures": ["MuseGlimmerAssistantModel"]}, "This is an assistant of Muse Glimmer"),
        ("DFlash", {"architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna"}, "with layers of Laguna"),
        ("DFlash", {"attention_sink_bias": True}, "attention_sink_bias: true"),
        (speculators, {"speculators_model_type": "domino", "architectures": ["DominoSpeculator"]}, "speculators_model"),
    ):
        path = relative(tmp_path / words, deep, name)
        config = json.loads(Path(path, "config.json").read_text())
        Path(path, "config.json").write_text(json.dumps({**config, **changes}))
        refused(lambda path=path: load_drafter(path, target=deep), ValueError, words)


# ---- files that are damaged, hostile, of another kind or for another target -----------------------------------


def load(path: Path | str, target: Any, **options: Any) -> DFlashDrafter:
    return DFlashDrafter.from_pretrained(str(path), target=target, **options)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "DFlash2 without its weights": ({"architectures": ["DFlash2DraftModel"]}, "candidate_selector"),
    "DFlash with parts of DFlash2": ({"dflash_config__selector_rank": 256}, "selector_rank"),
    "DSpark without its weights": ({"architectures": ["DSparkDraftModel"]}, "markov_head"),
    "another architecture": ({"architectures": ["DFlashDominoModel"]}, "DFlashDominoModel"),
    "a state without its weights": (
        {"architectures": ["Qwen3DSparkModel"], "markov_rank": 4, "markov_head_type": "rnn"}, "joint_proj"
    ),
    "groups that do not fit": (
        {"architectures": ["DFlash2DraftModel"], "dflash_config__conv_group_size": 7}, "conv_group_size"
    ),
    "an adapter between widths": ({"dflash_config__target_hidden_size": 64}, "target_hidden_size"),
    "no architecture": ({"architectures": None}, "no config.json of DFlash drafters"),
    "another backbone": ({"model_type": "llama"}, 'model_type: "llama"'),
    "Domino without its sizes": ({"dflash_config__projector_type": "domino"}, "gru_hidden_dim"),
    "another projector": ({"dflash_config__projector_type": "linear"}, "projector_type"),
    "a layout that is no flag": ({"dflash_config__shift_label": 1}, "shift_label"),
    "two layouts": ({"sample_from_anchor": True, "dflash_config__shift_label": False}, "contradicts"),
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
    "two factors": ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"factor": 4}}, "contradicts"),
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
