"""Gemma 3 270M, which others trained: drafted text is stock's, where the model is installed (examples/gemma3_270m)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import assert_identical
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dart import LookupDrafter, TreeConfig, attach

FOLDER = Path(os.environ.get("HF_DART_GEMMA", Path.home() / ".cache" / "hf_dart" / "gemma-3-270m"))
REASON = f"{FOLDER} is not there; examples/gemma3_270m/real_target.py makes it, HF_DART_GEMMA names another one"
pytestmark = [pytest.mark.real, pytest.mark.skipif(not FOLDER.is_dir(), reason=REASON)]

TASK = "Rewrite the text in the past tense.\n\nText: {}\nPast tense:"
EXAMPLE = TASK.format("The train leaves at nine and arrives before noon.")
SOLVED = f"{EXAMPLE} The train left at nine and arrived before noon.\n\n\n"
TEXTS = [
    SOLVED + TASK.format("The gardener waters the red roses and carries the dry leaves to the compost."),
    SOLVED + TASK.format("The committee reads all nine letters, answers two of them and files the others by date."),
    TASK.format("The ferry crosses the sound six times a day."),
]
MODES = {
    "greedy": {"do_sample": False},
    "T=0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "T=1": {"do_sample": True, "top_k": 0},
}


@pytest.fixture(scope="module")
def gemma() -> Any:
    """In float64, where no two choices are as close as rounding."""
    return attach(AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64).eval())


def written(gemma: Any, texts: list[str], mode: str) -> float:
    """Write with and without drafts, compare, and tell tau."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    drafter = LookupDrafter(TreeConfig(nodes=16, draft_cost=0.0))
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    assert_identical(gemma, drafter, inputs, max_new_tokens=32, **MODES[mode])
    return drafter.last_stats.tau


@pytest.mark.parametrize("mode", MODES)
def test_text_is_stocks(gemma: Any, mode: str) -> None:
    assert written(gemma, TEXTS[:1], mode) > 1.3


def test_text_beyond_the_sliding_window_is_stocks(gemma: Any) -> None:
    assert written(gemma, [SOLVED * 16 + TEXTS[0]], "greedy") > 1.3


@pytest.mark.parametrize("mode", ["greedy", "T=0.7"])
def test_text_of_a_batch_is_stocks(gemma: Any, mode: str) -> None:
    assert written(gemma, TEXTS, mode) > 1.3
