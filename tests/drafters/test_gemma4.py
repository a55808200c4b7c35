"""Assistants of Gemma 4: drafts as transformers' own, text as stock gives it, and files read strictly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from safetensors.torch import load_file, save_file
from support.assistants import VOCABULARY, Stock, assistant_checkpoint, gemma4_drafter, gemma4_target, stock_assistant
from support.cases import GREEDY, SAMPLED
from support.compare import assert_identical, tally
from support.engines import engine
from support.heads import assert_beam, draft_after
from support.sentences import not_read
from support.tiny import tiny_target
from surveys.media_by_class import MEDIA
from surveys.multimodal_classes import inputs_with_media
from surveys.small import builds_with

from hf_dart import Batcher, Gemma4Drafter, TreeConfig, attach, load_drafter
from hf_dart.models.stock_steps import CACHE

EXACT = tally("float64, assistants of Gemma 4", least=1.3)
PAIRS = [("Gemma4", 0, False), ("Gemma4", 3, True), ("Gemma4Unified", 0, True)]


def texts(rows: int, length: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
@pytest.mark.parametrize(("family", "shared", "ordered"), PAIRS)
@pytest.mark.parametrize("length", [5, 21])
def test_drafts_are_those_of_transformers(tmp_path: Path, family: str, shared: int, ordered: bool, length: int) -> None:
    """Chains token by token as the candidate generator's, and branches, within the window and far beyond it."""
    target, assistant = gemma4_target(family, shared), stock_assistant(family, ordered)
    drafter, ids = gemma4_drafter(tmp_path, target, assistant), texts(1, length)
    assert isinstance(drafter, Gemma4Drafter)
    stock = Stock(target, assistant, ids)
    assert_beam(draft_after(target, drafter, ids), 0, stock.after)
    drafter.beam = 1
    chain = draft_after(target, drafter, ids)
    assert [*chain.branches[0, :, 0].tolist(), int(chain.logits[0, -1].argmax())] == stock.chain()
    before = copy.deepcopy(drafter._rotary[0].full_attention_inv_freq)
    assert torch.equal(drafter.bfloat16()._rotary[0].full_attention_inv_freq, before), "not rounded with the weights"


@pytest.mark.parametrize(("family", "shared", "ordered"), PAIRS)
def test_text_is_stocks(tmp_path: Path, family: str, shared: int, ordered: bool) -> None:
    target = gemma4_target(family, shared)
    drafter = gemma4_drafter(tmp_path, target, stock_assistant(family, ordered))
    ids, seen = texts(3, 13), torch.ones(3, 13, dtype=torch.long)
    seen[0, :4] = seen[2, :9] = 0
    for mode in (GREEDY, SAMPLED):
        for tree in (TreeConfig(nodes=12), TreeConfig.chain(4)):
            inputs = {"input_ids": ids, "attention_mask": seen}
            assert_identical(target, drafter, inputs, **mode, tree_config=tree, into=EXACT)


@pytest.mark.gpu
def test_positions_of_another_device_than_the_layers(tmp_path: Path) -> None:
    """As where a device map puts layers on a second GPU: transformers moves what they are given."""
    target = gemma4_target()
    decoder = target.get_decoder()
    add_hook_to_module(decoder.rotary_emb.to("cuda"), AlignDevicesHook("cuda:0"))
    for layer in decoder.layers:
        add_hook_to_module(layer, AlignDevicesHook("cpu"))
    assert_identical(target, gemma4_drafter(tmp_path, target), {"input_ids": texts(2, 9)}, **GREEDY, into=EXACT)


def test_turns_requests_and_compiled_rounds(tmp_path: Path) -> None:
    """Keys and values of two shapes in one state, which later turns take up and requests of a batcher share."""
    target = attach(gemma4_target())
    drafter, prompts = gemma4_drafter(tmp_path, target), [texts(1, length) for length in (5, 11)]
    written, shape = [], {"tree_config": TreeConfig(nodes=12)}
    for drafting in ({}, {"assistant": drafter, **shape}):
        first = target.generate(prompts[0], **GREEDY, return_dict_in_generate=True, **drafting)
        ids = torch.cat([first.sequences, prompts[1]], dim=1)
        written.append(target.generate(ids, **GREEDY, **{CACHE: first[CACHE]}, **drafting))
    assert torch.equal(*written)
    wanted = [target.generate(ids, **GREEDY) for ids in prompts]
    with Batcher(target, drafter) as batcher:
        asked = [batcher.submit(input_ids=ids, **GREEDY) for ids in prompts]
        assert all(torch.equal(one.result(), ids) for one, ids in zip(asked, wanted, strict=True))
    engine(target, drafter)
    assert_identical(target, drafter, {"input_ids": texts(2, 9)}, **SAMPLED, **shape, into=EXACT)
    assert drafter.engine.tiers


def test_text_after_images_is_stocks(tmp_path: Path) -> None:
    media = MEDIA["Gemma4ForConditionalGeneration"]
    text = gemma4_target(vocab_size=96).config.to_diff_dict()  # image tokens among them
    target = next(builds_with("Gemma4ForConditionalGeneration", "sdpa", {**media.own, "text_config": text}))
    drafter = gemma4_drafter(tmp_path, attach(target))
    for mode in (GREEDY, SAMPLED):
        assert_identical(target, drafter, inputs_with_media(target, media), **mode, into=EXACT)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no backbone": ({"backbone_hidden_size": "32"}, "backbone_hidden_size"),
    "another backbone": ({"backbone_hidden_size": 16}, "shape"),
    "other heads": ({"text_config__num_key_value_heads": 4}, "4 heads of width 8"),
    "an unknown field": ({"depth": 3}, "depth"),
    "an unknown field of the layers": ({"text_config__auto_map": {}, "text_config__gate": 1}, "gate"),
    "layers beyond all memory": ({"text_config__num_hidden_layers": 10**9}, "num_hidden_layers"),
    "a width beyond all memory": ({"text_config__hidden_size": 2**20}, "shape"),
    "another kind of layers": ({"text_config__layer_types": ["linear_attention"] * 3}, "kinds of layers"),
    "embeddings per layer": ({"text_config__hidden_size_per_layer_input": 4}, "hidden_size_per_layer_input"),
    "clusters of no size": ({"num_centroids": 5}, "5 clusters"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_config_must_not_say(tmp_path: Path, name: str) -> None:
    changes, words = WRONG[name]
    path = assistant_checkpoint(tmp_path, stock_assistant(ordered=True), **changes)
    not_read(lambda: load_drafter(path, target=gemma4_target()), words)


def test_what_it_is_loaded_for(tmp_path: Path) -> None:
    path = assistant_checkpoint(tmp_path, stock_assistant(ordered=True))
    not_read(lambda: load_drafter(path), "pass target=")
    others = {"drafts for a Gemma 4": tiny_target("llama"), "table of 12 rows": gemma4_target(vocab_size=18)}
    for words, other in others.items():
        not_read(lambda other=other: load_drafter(path, target=other), words)
    load_drafter(path, target=gemma4_target()).save_pretrained(tmp_path / "ours")
    other = tiny_target("llama", vocab_size=VOCABULARY, num_hidden_layers=6)
    not_read(lambda: load_drafter(str(tmp_path / "ours"), target=other), "which this target has not")
    weights = load_file(tmp_path / "model.safetensors")
    weights["masked_embedding.token_ordering"][0] = VOCABULARY
    save_file(weights, tmp_path / "model.safetensors")
    not_read(lambda: load_drafter(path, target=gemma4_target()), "every token once")
