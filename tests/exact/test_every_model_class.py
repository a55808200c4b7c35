"""Surveys: classes of transformers are exact, refused in a sentence of ours, or stock fails; families are exact."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from support.compare import tally
from support.families import REFUSED, needs_running_states
from support.tiny import prompts, tiny_target
from surveys.classes import QUICK, WAYS, Report, examine
from surveys.matrix import CELLS, COLUMNS, TESTED, run_cell
from surveys.multimodal_classes import classes_with_media
from surveys.multimodal_classes import examine as examine_with_media
from surveys.small import WORDS, build, class_names
from transformers import DynamicCache

from hf_dart import DartHead, LookupDrafter, attach
from hf_dart.models.features import layer_count
from hf_dart.models.stock_steps import CACHE

CLASSES = class_names()
# Others take long; a class more draws no others.
SAMPLE = sorted((name for name in CLASSES if name.endswith("CausalLM")), key=lambda name: crc32(name.encode()))[:12]


def check(report: Report) -> None:
    assert not report.wrong
    assert not report.crashes
    assert report.exact or report.refused or report.stock_fails
    assert not report.exact or report.tau > 1


def test_a_sample() -> None:
    kinds = Counter()
    for name in SAMPLE:
        report = examine(name, QUICK)
        check(report)
        kinds[report.kind] += 1
    assert kinds["exact"] > len(SAMPLE) // 2, kinds


_OTHERWISE = "computes something else for a token tree than stock does token by token"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("BltForCausalLM", "uses a EncoderDecoderCache that holds neither"),
        ("xLSTMForCausalLM", "cannot run plain text over a DynamicCache"),
        ("RwkvForCausalLM", "uses a DynamicCache that holds neither keys and values nor running states"),
        pytest.param("InklingForCausalLM", "cannot run a token tree", marks=needs_running_states),
        ("Kosmos2_5ForConditionalGeneration", _OTHERWISE),  # a token's position depends on its id
        ("MoshiForCausalLM", "has windows in its cache alone"),
        ("GlmImageForConditionalGeneration", "gives its tokens places in an image"),
        ("XLNetLMHeadModel", "(cannot run plain text over|uses) a DynamicCache"),  # names a position table of -1
    ],
)
def test_what_cannot_be_taken_back_is_told_when_attaching(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} {says}.*[;,] call generate without assistant=.$"):
        attach(build(name, "eager", torch.float32))


@needs_running_states
def test_an_lm_head_that_only_the_language_model_inside_names() -> None:
    model = build("NemotronH_Omni_Reasoning_V3", "eager")
    assert model.get_output_embeddings() is None
    assert DartHead.from_target(model).shared.lm_head is model.language_model.lm_head


@pytest.mark.parametrize(("name", "layers"), [("LongcatFlashForCausalLM", None), ("MllamaForCausalLM", 1)])
def test_layers_are_those_that_return_hidden_states(name: str, layers: int | None) -> None:
    """LongCat-Flash names twice as many; one of Mllama's two is for images."""
    model = build(name, "eager")
    assert layer_count(model) == (layers or model.config.num_hidden_layers // 2)
    states = model(input_ids=torch.tensor([[2, 3, 4]]), output_hidden_states=True).hidden_states
    assert len(states) == layer_count(model) + 1
    assert max(DartHead.from_target(model).config.feature_layers) == layer_count(model)


@torch.no_grad()
def test_an_image_in_the_cache_is_refused() -> None:
    """Mllama's layers of cross-attention keep it there; they take no part in a trial on text."""
    model = attach(build("MllamaForCausalLM", "sdpa"))
    cache, ids = DynamicCache(config=model.config), prompts([15], vocabulary=WORDS)["input_ids"]
    image = torch.randn(1, 40, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).double()
    model(input_ids=ids[:, :12], **{CACHE: cache}, use_cache=True, cross_attention_states=image)
    options = {"do_sample": False, "max_new_tokens": 6, CACHE: cache}
    with pytest.raises(ValueError, match=r"^The cache holds 40 entries after a prompt of 15 slots: .*\.$"):
        model.generate(ids, **options, assistant=LookupDrafter())
    assert cache.get_seq_length() == 12
    assert model.generate(ids, **options).shape[1] == 21


def test_what_does_not_generate_is_told_when_attaching() -> None:
    model = tiny_target("llama")
    for target in model.model, model:
        with pytest.raises(ValueError, match=rf"^{type(target).__name__} does not generate a token at a time .*\.$"):
            attach(target)
        model.__class__ = type("OwnLoop", (type(model),), {"_sample": lambda *args, **kwargs: None})


def test_images_that_a_default_drafter_leaves_to_stock() -> None:
    model, told = build("JanusForConditionalGeneration", "sdpa"), {"generation_mode": "image", "do_sample": False}
    model.generation_config.generation_kwargs = {"boi_token_id": 2}
    stock = model.generate(**prompts([9]), **told)
    attach(model, LookupDrafter())
    with pytest.warns(UserWarning, match="runs without drafts: .*generation_mode='image'"):
        assert torch.equal(model.generate(**prompts([9]), **told), stock)


@pytest.mark.matrix
@pytest.mark.parametrize("name", CLASSES)
def test_a_class(name: str) -> None:
    check(examine(name, WAYS))


SEEN_OR_HEARD = ["PaliGemmaForConditionalGeneration", "Qwen2_5OmniThinkerForConditionalGeneration"]
"""They have marks and masks that stock keeps, after an image and after a sound."""


@pytest.mark.parametrize(
    "name", [*SEEN_OR_HEARD, *(pytest.param(name, marks=pytest.mark.matrix) for name in classes_with_media())]
)
def test_a_class_that_sees_or_hears(name: str) -> None:
    seen = examine_with_media(name)
    assert seen.kind == "exact" if name in SEEN_OR_HEARD else seen.kind not in ("wrong", "crash"), seen
    assert seen.kind != "exact" or seen.tau > 1.3


# ---- families ---------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "column"), CELLS, ids=str)
def test_cell(family: str, column: Any) -> None:
    cell, total = run_cell(family, column), tally("matrix of families")
    assert cell.runs == 4
    total.taus += cell.total.taus
    total.near_ties += cell.total.near_ties
    assert cell.total.mean_tau > 1.3


def test_the_table_is_of_these_families() -> None:
    lines = (Path(__file__).parents[1] / "MATRIX.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    named = {row[0] for row in rows if len(row) == len(COLUMNS) + 3 and "/" in row[2]}
    assert named == set(TESTED)
    assert {row[0] for row in rows if len(row) == 2} >= set(REFUSED)
