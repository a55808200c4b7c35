"""The packaged pair and `examples/deep_pair` on text that none was trained on: float32, token for token as stock.

A difference is a failure unless stock's own two best tokens lie within 1e-5 of each other there, in its
logits, or in log(p / E) when it samples; such cases are counted and printed at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import assert_identical_up_to_near_ties, tally
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dart import DartHead
from hf_dart.bench import suites
from hf_dart.hub.loading import PACKAGED_TARGET

SMALL, DEEP = PACKAGED_TARGET.parent, Path(__file__).parents[2] / "examples" / "deep_pair"
NEW_TOKENS = 24
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "T=1": {"do_sample": True, "top_k": 0},
    "top-p, penalty": {"do_sample": True, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.1},
}
LENGTHS = [120, 64, 97, 33, 150, 21, 80, 48]
FIGURES = tally("float32, packaged and deep pair, text of pytest's own sources", least=1.3)


def load(folder: Path) -> tuple[Any, DartHead, Any]:
    target = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.padding_side = "left"
    return target, DartHead.from_pretrained(folder / "head", target=target, tokenizer=tokenizer), tokenizer


@pytest.fixture(scope="module", params=[SMALL, pytest.param(DEEP, marks=pytest.mark.matrix)])
def pair(request: pytest.FixtureRequest) -> tuple[Any, DartHead, Any]:
    return load(request.param)


@pytest.fixture(scope="module")
def texts(pair: tuple[Any, DartHead, Any]) -> list[list[int]]:
    """Eight prompts of different lengths, each of another source file of pytest."""
    prompts = suites.cut_prompts(pair[2], suites.texts()[1], len(LENGTHS), 225)
    return [prompt[:length] for prompt, length in zip(prompts, LENGTHS, strict=True)]


@pytest.mark.parametrize(("folder", "target", "megabytes"), [(SMALL, "py8m", 24), (DEEP, "py17m", 44)])
def test_the_pairs_are_known_and_small(folder: Path, target: str, megabytes: int) -> None:
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} <= {".safetensors", ".json"}
    assert {file.parent.name for file in files} == {"model", "head"}
    assert sum(file.stat().st_size for file in files) <= megabytes * 1e6
    model, head, tokenizer = load(folder)
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    assert head.config.target_name == target
    assert head.config.tokenizer_hash is not None


def check(pair: tuple[Any, DartHead, Any], prompts: list[list[int]], label: str, **options: Any) -> None:
    target, head, tokenizer = pair
    inputs = dict(tokenizer.pad({"input_ids": prompts}, return_tensors="pt"))
    assert_identical_up_to_near_ties(target, head, inputs, into=FIGURES, label=label, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 4])
def test_prompts_alone_and_in_batches(
    pair: tuple[Any, DartHead, Any], texts: list[list[int]], size: int, mode: str
) -> None:
    for seed in range(0, len(texts), size):
        label = f"{mode}, {size} from prompt {seed}"
        check(pair, texts[seed : seed + size], label, seed=seed, max_new_tokens=NEW_TOKENS, **MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_the_deep_pair(texts: list[list[int]], mode: str) -> None:
    """One padded batch; what else is here runs it with `-m matrix`."""
    target, head, _ = deep = load(DEEP)
    assert target.config.num_hidden_layers >= 20
    check(deep, texts[:2], f"{mode}, deep", max_new_tokens=NEW_TOKENS, **MODES[mode])
    assert head.last_stats.tau > 1.3
