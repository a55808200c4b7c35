"""Options of `from_pretrained` mean the same in whatever form a drafter was saved; and what drafts cost."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from support.checkpoints import save
from support.eagle3 import eagle3_config, original_config, original_tensors
from support.guests import dflash_config, dflash_tensors
from support.sentences import refused
from support.tiny import VOCABULARY, prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target

from hf_dart import DartHead, DFlashDrafter, EagleDrafter, NgramTable, TreeConfig
from hf_dart.decoding.api import requested
from hf_dart.drafters.cost import _CALL
from hf_dart.drafters.lookup import LookupDrafter
from hf_dart.trees.ngram.build import build


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("qwen3", dtype=torch.float32, num_hidden_layers=8)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("table") / "x.ngram"
    build([np.arange(500) % VOCABULARY], file, vocab_size=VOCABULARY)
    return file


def plain(target: Any, folder: Path) -> None:
    tiny_head(target).half().save_pretrained(folder)


def adapter(target: Any, folder: Path) -> None:
    head = tiny_head(target).half()
    head.save_pretrained(folder.with_name("base"))
    head.add_adapter(LoraConfig(r=2))
    head.save_pretrained(folder)


def copied(target: Any, folder: Path) -> None:
    head = DartHead.from_target(target, copy_layer="last")
    head.add_adapter(LoraConfig(r=2))
    head.save_pretrained(folder)


def original(target: Any, folder: Path) -> None:
    config = original_config(target)
    save(folder, config, original_tensors(config), dtype=torch.half)


def published(target: Any, folder: Path) -> None:
    config = dflash_config(target)
    save(folder, config, dflash_tensors(config), dtype=torch.half)


OTHERS: dict[str, tuple[Any, type, str]] = {
    "DFlash": (dflash_config, EagleDrafter, "a DFlash drafter .*, and no EAGLE head: load it with DFlashDrafter."),
    "eagle": (eagle3_config, DartHead, "EAGLE-3 head .*, and no DART head: load it with EagleDrafter, or train it on"),
    "target": (lambda target: target.config.to_dict(), DartHead, "a language model, and no DART .* LanguageModelDr"),
    "another": (lambda target: {"model_type": "t5"}, EagleDrafter, "no config.json of EAGLE heads .model_type 't5'"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_is_named(target: Any, tmp_path: Path, name: str) -> None:
    make, asked, says = OTHERS[name]
    save(tmp_path, make(target), {})
    refused(lambda: asked.from_pretrained(str(tmp_path), target=target), ValueError, says)


@pytest.mark.parametrize("form", [plain, adapter, copied, original, published])
def test_table_and_dtype(target: Any, table: Path, tmp_path: Path, form: Any) -> None:
    path = str(tmp_path / form.__name__)
    form(target, Path(path))
    load = partial((DFlashDrafter if form is published else DartHead).from_pretrained, path, target=target)
    assert isinstance(load(ngram=table).ngram, NgramTable)
    refused(lambda: load(ngram=tmp_path / "gone"), (ValueError, OSError), "gone")
    saved = torch.float32 if form is copied else torch.float16
    wanted = {None: torch.float32, "auto": saved, "bfloat16": torch.bfloat16, torch.float64: torch.float64}
    for dtype, found in wanted.items():
        assert next(load(dtype=dtype).parameters()).dtype == found
    with pytest.raises(TypeError, match="no option 'revison'; did you mean 'revision'"):
        load(revison="main")
    if form is published:
        assert load().name_or_path == path
    refused(lambda: load(dtype="bf17"), ValueError, "dtype is 'bf17'")


def test_an_lm_head_that_was_replaced_is_read() -> None:
    target = tiny_target("llama", tie_word_embeddings=False)
    head = tiny_head(target)
    hidden = torch.ones(1, head.config.hidden_size, dtype=head.dtype)
    before = head.logits(hidden)
    target.lm_head = deepcopy(target.lm_head)
    target.lm_head.weight.data.neg_()
    head.check_target(target)
    assert torch.equal(head.logits(hidden), -before)


def test_a_draft_costs_what_its_weights_do() -> None:
    """By weights and by their number: a head beside which the target is small is charged for it."""
    target = tiny_target("llama")
    small, large = tiny_head(target), tiny_head(target, num_layers=5)
    assert 0.2 < small.draft_cost(target) < large.draft_cost(target)
    lm_head, embeddings = target.get_output_embeddings().weight, target.get_input_embeddings().weight
    own, read = ([weight.numel() for weight in model.parameters()] for model in (small, target))
    looked_up = 0 if lm_head is embeddings else embeddings.numel()
    ratio = (sum(own) + lm_head.numel() + _CALL * (len(own) + 1)) / (sum(read) - looked_up + _CALL * len(read))
    assert small.draft_cost(target) == pytest.approx(0.1 + ratio)
    alone = tiny_head(target, own_lm_head=True)
    assert alone.lm_head_weights == 0
    few = tiny_head(target, draft_vocab_size=12)
    assert few.draft_cost(target) < small.draft_cost(target)
    step = tiny_eagle_drafter(target)
    assert step.draft_cost(target, 4) - 0.1 == pytest.approx(4 * (step.draft_cost(target, 1) - 0.1))
    deeper = requested(target, **prompts([3]), assistant=step, tree_config=TreeConfig(depth=16))
    assert deeper.tree_config.draft_cost == step.draft_cost(target), "no deeper than it drafts"
    several = tiny_diffusion_drafter(target)
    assert [several.passes(depth) for depth in (1, 3, 5)] == [3, 3, 3]
    assert LookupDrafter().tree_config.draft_cost == 0
