"""Every reader of files that has no attack tests of its own: drafters, adapters, records, benches, recipes, suites.

Those of n-gram tables, tries and published checkpoints stand beside the other tests of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support.attacks import VALUES, changed, damaged, seeds, survives
from support.compare import assert_identical
from support.tiny import prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target
from transformers import AutoTokenizer

from hf_dart import DartConfig, DartHead, TreeConfig
from hf_dart.bench import drafts, suites
from hf_dart.bench.pair import PACKAGED_HEAD
from hf_dart.bench.render import table
from hf_dart.drafters.diffusion.configuration import DiffusionConfig
from hf_dart.drafters.eagle.configuration import EagleConfig
from hf_dart.drafters.registry import load_drafter
from hf_dart.errors import UserError
from hf_dart.hub.card import eval_results, render_card
from hf_dart.hub.facts import TRAINING_RECORD, HeadFacts
from hf_dart.target.loading import PACKAGED_TARGET, load_target
from hf_dart.training.recipe import read_recipe
from hf_dart.training.regenerate.regenerate import Shard, begin

BENCH = Path(__file__).parents[1] / "model_cards" / "demo_pair" / "bench.json"
KINDS: dict[str, Callable[..., Any]] = {
    "dart": tiny_head, "eagle": tiny_eagle_drafter, "diffusion": tiny_diffusion_drafter
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("llama", dtype=torch.float32)


def one_line(read: Callable[[], Any]) -> Callable[[], Any]:
    """A reader of a command: its errors are what the command prints."""

    def reading() -> Any:
        try:
            return read()
        except (UserError, ValueError) as error:
            raise ValueError(f"{str(error).rstrip('.?')}.") from error

    return reading


@pytest.mark.parametrize("part", seeds(8, 1000))
@pytest.mark.parametrize("kind", KINDS)
def test_configs_of_drafters(target: Any, tmp_path: Path, kind: str, part: range) -> None:
    KINDS[kind](target).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf8"))
    for seed in part:
        (tmp_path / "config.json").write_text(changed(config, seed), encoding="latin1")
        survives(lambda: load_drafter(str(tmp_path), target=target))


@pytest.mark.parametrize("part", seeds(8, 1000))
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_drafters(target: Any, tmp_path: Path, kind: str, part: range) -> None:
    """What is read drafts worse at most: the text is the target's."""
    KINDS[kind](target).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    double = tiny_target("llama")
    for seed in part:
        file.write_bytes(damaged(content, seed))
        if survives(lambda: load_drafter(str(tmp_path), target=target)) and seed % 10 == 1:
            drafter = load_drafter(str(tmp_path), target=double)
            assert_identical(double, drafter, prompts([5]), do_sample=False, max_new_tokens=6)


@pytest.mark.parametrize("part", seeds(8, 1000))
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapters(target: Any, tmp_path: Path, name: str, part: range) -> None:
    head = tiny_head(target)
    head.save_pretrained(tmp_path / "head")
    head.add_adapter(LoraConfig(r=2))
    head.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / name
    content = file.read_bytes()
    for seed in part:
        if name.endswith(".json"):
            file.write_text(changed(json.loads(content), seed), encoding="latin1")
        else:
            file.write_bytes(damaged(content, seed))
        survives(lambda: DartHead.from_pretrained(str(tmp_path / "adapter"), target=target))


@pytest.mark.parametrize("part", seeds(3, 1000))
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                                  "tokenizer_config.json"])  # fmt: skip
def test_targets(target: Any, tmp_path: Path, name: str, part: range) -> None:
    """What transformers reads is its own matter, but a damaged file is no traceback."""
    target.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(PACKAGED_TARGET).save_pretrained(tmp_path)
    content = (tmp_path / name).read_bytes()

    def read() -> None:
        with torch.random.fork_rng(devices=[]):  # weights that are missing are drawn
            load_target(str(tmp_path))

    for seed in part:
        if name.endswith(".json") and seed % 3:
            (tmp_path / name).write_text(changed(json.loads(content), seed), encoding="latin1")
        else:
            (tmp_path / name).write_bytes(damaged(content, seed))
        survives(one_line(read))


@pytest.mark.parametrize("part", seeds(60, 1500))
def test_benches(tmp_path: Path, part: range) -> None:
    good = json.loads(BENCH.read_text(encoding="utf8"))
    file = tmp_path / "bench.json"
    read = 0
    for seed in part:
        file.write_text(mutated(good, "results", seed), encoding="latin1")

        def card() -> None:
            facts = HeadFacts.read(PACKAGED_HEAD, bench=file, bench_dataset="them/prompts")
            render_card(facts)
            eval_results(facts)

        read += survives(lambda: table(file))
        survives(card)
    assert 0 < read < len(part)


def mutated(content: dict[str, Any], entries: str, seed: int) -> str:
    """`changed`, of the object or of one of its `entries`."""
    random = Random(seed)
    if seed % 2:
        return changed(content, random.randrange(2**30))
    place = random.randrange(len(content[entries]))
    text = changed(content[entries][place], 8 * random.randrange(2**20) + random.randrange(7))
    return json.dumps({**content, entries: [*content[entries][:place], json.loads(text)]})


@pytest.mark.parametrize("part", seeds(40, 1200))
def test_tables_of_drafts(tmp_path: Path, part: range) -> None:
    content = json.loads((Path(__file__).parents[1] / "model_cards" / "drafts" / "drafts.json").read_text())
    content["results"] = content["results"][:4]
    file = tmp_path / "drafts.json"
    read = 0
    for seed in part:
        file.write_text(mutated(content, "results", seed), encoding="latin1")
        read += survives(lambda: drafts.earlier(file))
    assert 0 < read < len(part)


@pytest.mark.parametrize("part", seeds(60, 1500))
def test_training_records(tmp_path: Path, part: range) -> None:
    record = {
        "loss": "dart", "steps": 100, "rows_per_step": 8, "anchors_per_row": 24, "tokens": 10_000, "optimizer": "adamw",
        "learning_rate": 1e-3, "schedule": "cosine", "seed": 0, "weights_dtype": "float32", "target_dtype": "bfloat16",
        "precision": "bf16", "processes": 2, "hardware": "two cores", "versions": {"torch": "2.13"},
        "evaluation": {"eval_tau": 2.0, "eval_tau_sampled": 1.5}, "recipe": {"train_data": ["them/data"], "seed": 0},
    }  # fmt: skip
    file = tmp_path / TRAINING_RECORD
    read = 0
    for seed in part:
        file.write_text(changed(record, seed), encoding="latin1")
        read += survives(lambda: render_card(HeadFacts.read(PACKAGED_HEAD, training=file)))
    assert 0 < read < len(part)


@pytest.mark.parametrize("part", seeds(40, 1200))
def test_recipes(tmp_path: Path, part: range) -> None:
    recipe = {
        "drafter": "dart", "output_dir": str(tmp_path / "run"), "train_data": ["a.jsonl", "b.jsonl"], "max_steps": 5,
        "shares": [0.5, 0.5], "learning_rate": 0.001, "tree": {"nodes": 8}, "packing": True, "lora_rank": 4,
    }  # fmt: skip
    read = 0
    for seed in part:
        file = tmp_path / ("recipe.json" if seed % 3 else "recipe.yaml")
        file.write_text(changed(recipe, seed), encoding="latin1")
        read += survives(one_line(lambda file=file: read_recipe([str(file)])))  # type: ignore[misc]
    assert 0 < read < len(part)


@pytest.mark.parametrize("part", seeds(40, 1200))
def test_suites(tmp_path: Path, part: range) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED_TARGET)
    rows = [
        {"prompt": "import os"},
        {"messages": [{"role": "user", "content": "class A:"}], "tools": {"a": 1}},
        {"question": "def f("},
    ]
    file = tmp_path / "suite.jsonl"
    read = 0
    for seed in part:
        lines = [json.dumps(row) for row in rows]
        lines[seed % 3] = changed(rows[seed % 3], seed)
        content = "\n".join(lines).encode("latin1")
        file.write_bytes(damaged(content, seed) if seed % 4 == 3 else content)
        read += survives(one_line(lambda: suites.open_suite(str(file), tokenizer, 3)))
    assert 0 < read < len(part)


CONFIGS: dict[type, dict[str, Any]] = {
    DartConfig: {"target_num_layers": 8},
    EagleConfig: {"target_num_layers": 8},
    DiffusionConfig: {"target_num_layers": 8},
    TreeConfig: {},
}


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_fields_of_another_type(kind: Any) -> None:
    """What a field may not hold is refused at once, by its name, and not where it is first used."""
    accepted: dict[str, list[Any]] = {}
    refusals = []
    for name in (name for one in kind.__mro__ if one in CONFIGS for name in one.__annotations__):
        for value in [*VALUES, 10**400, float("nan")]:
            try:
                config = kind(**{**CONFIGS[kind], name: value})
            except ValueError as error:
                refusals.append(str(error))
            else:
                accepted.setdefault(name, []).append(getattr(config, name))
    assert all(words.endswith(".") and "\n" not in words for words in refusals)
    usual = kind(**CONFIGS[kind])
    alike = {float: (float, int), tuple: (list, tuple)}
    for name, values in accepted.items():
        own = getattr(usual, name)
        types = (type(None), int, str, bool, list) if own is None else alike.get(type(own), (type(own),))
        if name == "draft_cost":
            types = (type(None), int, float)
        assert {type(value) for value in values} <= set(types), name
        assert all(value == value for value in values), name
    assert len(accepted) > 8


@pytest.mark.parametrize("part", seeds(60, 1500))
def test_progress_of_regenerated_text(tmp_path: Path, part: range) -> None:
    """A damaged note of what is done never costs text that a whole one would have kept."""
    settings = {"temperature": 1.0, "seed": 0}
    begin(tmp_path, settings, {})
    output = Shard(tmp_path)
    output.append([{"text": "import os"}, {"text": "class A:"}])
    note, text = output.path.with_suffix(".progress"), output.path.read_bytes()
    good = json.loads(note.read_text(encoding="utf8"))
    kept, read = (tmp_path / "settings.json").read_text(encoding="utf8"), 0
    for seed in part:
        output.path.write_bytes(text)
        note.write_text(changed(good, seed), encoding="latin1")
        read += survives(lambda: Shard(tmp_path))
        (tmp_path / "settings.json").write_text(changed(json.loads(kept), seed), encoding="latin1")
        survives(lambda: begin(tmp_path, settings, {}))
    assert 0 < read < len(part)
