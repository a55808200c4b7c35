"""Every reader of files that has no attack tests of its own: drafters, adapters, records, benches, recipes, suites.

Those of n-gram tables, tries and published checkpoints stand with the other tests of these.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from support.attacks import VALUES, as_one_line, attack, changed, damaged, seeds, survives
from support.sentences import refused
from support.tiny import tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target
from transformers import AutoTokenizer

from hf_dart import DartConfig, DartHead, TreeConfig, load_drafter
from hf_dart.bench import suites
from hf_dart.drafters.diffusion.drafter import DiffusionConfig
from hf_dart.drafters.eagle.drafter import EagleConfig
from hf_dart.hub.card import render_card
from hf_dart.hub.facts import HeadFacts
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET, load_target
from hf_dart.training.recipe import read_recipe
from hf_dart.training.regenerate.shards import keep_settings

BENCH = Path(__file__).parents[2] / "model_cards" / "demo_pair" / "bench.json"
KINDS: dict[str, Callable[..., Any]] = {
    "dart": tiny_head, "eagle": tiny_eagle_drafter, "diffusion": tiny_diffusion_drafter
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("llama", dtype=torch.float32)


@pytest.mark.parametrize("part", seeds(3, 1000))
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                                  "tokenizer_config.json"])  # fmt: skip
def test_targets(target: Any, tmp_path: Path, name: str, part: range) -> None:
    """What transformers reads is its own matter, but a damaged file is no traceback."""
    target.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(PACKAGED_TARGET).save_pretrained(tmp_path)

    def read() -> None:
        with torch.random.fork_rng(devices=[]):  # weights that are missing are drawn
            load_target(str(tmp_path))

    attack(tmp_path / name, as_one_line(read), part)


def read_bench(file: Path) -> None:
    render_card(HeadFacts.read(PACKAGED_HEAD, bench=file))


RECORD = {
    "loss": "dart", "steps": 100, "tokens": 10_000, "learning_rate": 1e-3, "hardware": "two cores",
    "evaluation": {"eval_tau": 2.0, "eval_tau_sampled": 1.5}, "recipe": {"train_data": ["them/data"], "seed": 0},
}  # fmt: skip
RECIPE = {
    "drafter": "dart", "output_dir": "run", "train_data": ["a.jsonl", "b.jsonl"], "max_steps": 5,
    "shares": [0.5, 0.5], "learning_rate": 0.001, "tree": {"nodes": 8}, "packing": True, "lora_rank": 4,
}  # fmt: skip
READERS: dict[str, tuple[dict[str, Any], Callable[[Path], Any]]] = {
    "training.json": (RECORD, lambda file: render_card(HeadFacts.read(PACKAGED_HEAD, training=file))),
    "recipe.json": (RECIPE, lambda file: read_recipe([str(file)])),
    "recipe.yaml": (RECIPE, lambda file: read_recipe([str(file)])),  # JSON is YAML
    "bench.json": (json.loads(BENCH.read_text(encoding="utf8")), read_bench),
}


@pytest.mark.parametrize("part", seeds(40, 1500))
@pytest.mark.parametrize("name", READERS)
def test_reports_and_recipes(tmp_path: Path, name: str, part: range) -> None:
    content, read = READERS[name]
    file = tmp_path / name
    file.write_text(json.dumps(content))
    assert 0 < attack(file, as_one_line(lambda: read(file)), part) < len(part)


@pytest.mark.parametrize("part", seeds(60, 1500))
def test_results_of_a_bench(tmp_path: Path, part: range) -> None:
    good, were_read = json.loads(BENCH.read_text(encoding="utf8")), 0
    for seed in part:
        place = seed % len(good["results"])
        result = json.loads(changed(good["results"][place], 8 * seed + seed % 7))
        results = [*good["results"][:place], result, *good["results"][place + 1 :]]
        (tmp_path / "bench.json").write_text(json.dumps({**good, "results": results}))
        were_read += survives(lambda: read_bench(tmp_path / "bench.json"))
    assert 0 < were_read < len(part)


@pytest.mark.parametrize("part", seeds(40, 1200))
def test_suites(tmp_path: Path, part: range) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED_TARGET)
    rows = [
        {"prompt": "import os"},
        {"messages": [{"role": "user", "content": "class A:"}], "tools": {"a": 1}},
        {"question": "def f("},
    ]
    file = tmp_path / "suite.jsonl"
    were_read = 0
    for seed in part:
        lines = [json.dumps(row) for row in rows]
        lines[seed % 3] = changed(rows[seed % 3], seed)
        content = "\n".join(lines).encode("latin1")
        file.write_bytes(damaged(content, seed) if seed % 4 == 3 else content)
        were_read += survives(as_one_line(lambda: suites.open_suite(str(file), tokenizer, 3)))
    assert 0 < were_read < len(part)


@pytest.fixture
def adapter(target: Any, tmp_path: Path) -> Path:
    head = tiny_head(target)
    head.save_pretrained(tmp_path / "head")
    head.add_adapter(LoraConfig(r=2))
    head.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


# ---- what transformers would do for a file, and must not be asked to -------------------------------------------


def refused_quickly(read: Callable[[], Any], words: str) -> None:
    """In one sentence, in no time and without memory."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(read, (ValueError, OSError), words)
    assert time.monotonic() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


class Trap:
    """A pickle of it calls this when it is loaded."""

    opened: ClassVar[list[str]] = []

    def __reduce__(self) -> Any:
        return self.opened.append, ("a pickle was loaded",)


@pytest.mark.parametrize("name", ["../outside.bin", "inside.bin", "sub/inside.safetensors", "/outside.safetensors", 3])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_named_by_an_index(target: Any, tmp_path: Path, kind: str, name: Any) -> None:
    """Safetensors in its folder alone, whatever else is there."""
    folder = tmp_path / "head"
    KINDS[kind](target).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "sub").mkdir()
    Trap.opened.clear()
    for place in ("head/inside.bin", "outside.bin", "head/pytorch_model.bin", "head/sub/inside.safetensors"):
        torch.save({**weights, "trap": Trap()}, tmp_path / place)
    refused_quickly(lambda: load_drafter(str(folder), target=target), "holds no weights")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused_quickly(lambda: load_drafter(str(folder), target=target), "names the file|does not say")
    assert not Trap.opened
    save_file(weights, folder / "part.safetensors", metadata={"format": "pt"})
    index["weight_map"] = dict.fromkeys(weights, "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load_drafter(str(folder), target=target)
    save_file({"norm.weight": weights["norm.weight"]}, folder / "other.safetensors")
    index["weight_map"]["norm.weight"] = "other.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused_quickly(lambda: load_drafter(str(folder), target=target), "hold norm.weight twice")


FOREIGN: dict[str, Any] = {
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}, "attn_implementation": "a/kernel",
    "_attn_implementation": "a/kernel", "experts_implementation": "a/kernel", "num_labels": 10**9,
    "auto_map": {"AutoModel": "code.Model"}, "transformers_weights": "../x.safetensors",
    "configuration_files": ["config.5.0.0.json"], "use_kernels": True, "name_or_path": "else/where",
}  # fmt: skip


# Sizes that the weights do not have.
SIZES = dict.fromkeys(["intermediate_size", "num_attention_heads", "head_dim", "vocab_size", "num_layers"], 2**30)


@pytest.mark.parametrize("field", [*FOREIGN, *SIZES])
@pytest.mark.parametrize("kind", KINDS)
def test_fields_that_a_config_may_not_have(target: Any, tmp_path: Path, kind: str, field: str) -> None:
    """Those that give orders to transformers, by their names."""
    KINDS[kind](target).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, field: {**FOREIGN, **SIZES}[field]}))
    refused_quickly(lambda: load_drafter(str(tmp_path), target=target), field if field in FOREIGN else r"\.$")


@pytest.mark.parametrize("content", ["[1]", "null", '"x"', "3", "{", '{"a": 1, "a": 2}', "[" * 100_000])
def test_configs_that_are_no_object(target: Any, tmp_path: Path, content: str) -> None:
    tiny_head(target).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(content)
    refused_quickly(lambda: load_drafter(str(tmp_path), target=target), "JSON|twice|cannot be read")


HOSTILE: dict[str, Any] = {
    "r": 2**24, "rank_pattern": {"q_proj": 2**24}, "init_lora_weights": "loftq", "megatron_config": {"a": 1},
    "layer_replication": [[0, 10**9]], "layers_pattern": ["(a+)+$"], "exclude_modules": "(([a-z.])+)+!",
    "alpha_pattern": {"(([a-z.])+)+!": 1}, "modules_to_save": ["(([a-z.])+)+!"], "trainable_token_indices": [2**30],
    "peft_type": "VERA", "base_model_name_or_path": "SELF",
}  # fmt: skip


def with_field(adapter: Path, **fields: Any) -> str:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf8")), **fields}), encoding="utf8")
    return str(adapter)


@pytest.mark.parametrize("field", HOSTILE)
def test_adapters_that_ask_for_more_than_lora(target: Any, adapter: Path, field: str) -> None:
    value = str(adapter) if HOSTILE[field] == "SELF" else HOSTILE[field]
    path = with_field(adapter, **{field: value})
    words = {"r": "the r of", "rank_pattern": "the r of", "base_model_name_or_path": "pass base="}.get(field, field)
    refused_quickly(lambda: DartHead.from_pretrained(path, target=target), words)


def test_patterns_of_adapters_are_not_run(target: Any, adapter: Path) -> None:
    """The weights say which modules a pattern has found."""
    path = with_field(adapter, target_modules=r"(([\w.])+)+!")
    start = time.monotonic()
    head = DartHead.from_pretrained(path, target=target)
    assert time.monotonic() - start < 10
    names = sorted(name for name, part in head.named_modules() if hasattr(part, "lora_A"))
    assert any(name.endswith("q_proj") for name in names)
    assert sorted(head.peft_config["default"].target_modules) == names


@pytest.mark.parametrize("kind", ["eagle", "diffusion"])
def test_adapters_beside_other_drafters(target: Any, tmp_path: Path, kind: str) -> None:
    """transformers would load the model that an adapter names in place of this one."""
    KINDS[kind](target).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "else/where"}))
    refused_quickly(lambda: load_drafter(str(tmp_path), target=target), "holds an adapter")


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
    own = [one for one in kind.__mro__ if one.__module__.startswith("hf_dart")]
    for name in (name for one in own for name, said in one.__annotations__.items() if "ClassVar" not in said):
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
        if name in ("draft_cost", "level_cost", "node_cost"):
            types = (type(None), int, float)
        assert {type(value) for value in values} <= set(types), name
        assert all(value == value for value in values), name
    assert len(accepted) > 8


@pytest.mark.parametrize("part", seeds(40, 1200))
def test_settings_of_regenerated_text(tmp_path: Path, part: range) -> None:
    settings = {"temperature": 1.0, "seed": 0}
    keep_settings(tmp_path, settings, {})
    assert 0 < attack(tmp_path / "settings.json", lambda: keep_settings(tmp_path, settings, {}), part) < len(part)
