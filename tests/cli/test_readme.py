"""What README and docs show runs: their Python, word for word but for the names of models, and their links."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from support import tiny
from support.sights import seeing_target, sights
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchFeature

import hf_dart
from hf_dart import DartHead
from hf_dart.bench.pair import PACKAGED_HEAD
from hf_dart.target.loading import PACKAGED_TARGET
from hf_dart.training import DartTrainer, DartTrainingArguments
from hf_dart.training.objective.objective import PRESETS, Objective
from hf_dart.training.trainers.evaluate import DraftQuality
from hf_dart.trees.ngram.build import build

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf8"), re.DOTALL | re.MULTILINE)


def run(code: str, names: dict[str, Any], folder: Path) -> None:
    stands_for = {
        '"Qwen/Qwen3-8B"': repr(str(PACKAGED_TARGET)),
        '"Qwen/Qwen3-4B"': repr(str(PACKAGED_TARGET)),
        '"z-lab/Qwen3-4B-DFlash-b16"': repr(str(PACKAGED_HEAD)),
        '"someone/dart-qwen3-8b"': repr(str(PACKAGED_HEAD)),
        '"someone/diffusion-qwen3-8b"': repr(str(folder / "diffusion")),
        '"Qwen/Qwen3-0.6B"': repr(str(PACKAGED_TARGET)),
        '"runs/': f'"{folder}/',
        '"all.ngram"': repr(str(folder / "all.ngram")),
        '"answers.jsonl"': repr(str(folder / "answers.jsonl")),
        "max_new_tokens=512": "max_new_tokens=24",
        "max_steps=20_000": "max_steps=2, per_device_train_batch_size=1",
        'device_map="auto"': 'dtype="float32"',
    }
    for shown, meant in stands_for.items():
        code = code.replace(shown, meant)
    exec(compile(code, "page", "exec"), names)


@pytest.fixture
def names() -> dict[str, Any]:
    """What pages take for granted."""
    model = AutoModelForCausalLM.from_pretrained(PACKAGED_TARGET, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED_TARGET)
    inputs = tokenizer("import os", return_tensors="pt")
    return {"model": model, "tokenizer": tokenizer, "inputs": inputs, "DartHead": DartHead}


def test_readme(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    first, *others = blocks(ROOT / "README.md")
    monkeypatch.chdir(ROOT)
    exec(compile(first, "README.md", "exec"), names)  # word for word
    assert float(capsys.readouterr().out) > 1
    names["tokenizer"].chat_template = TEMPLATE
    names["drafter"].last_stats = None
    assert others
    for code in others:
        run(code, names, tmp_path)
    assert names["drafter"].last_stats.rounds > 0


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf8").splitlines()) <= 150


def test_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    first, by_default, mixed = blocks(ROOT / "docs" / "use.md")
    run(first, names, tmp_path)
    assert float(capsys.readouterr().out) > 1
    names["head"].last_stats = None
    run(by_default, names, tmp_path)
    assert names["head"].last_stats.rounds > 0
    assert "generate" not in vars(names["model"])
    run(mixed, {**names, "model": hf_dart.attach(names["model"])}, tmp_path)
    assert names["head"].last_stats.tau > 1


def test_drafters(names: dict[str, Any], tmp_path: Path) -> None:
    tiny.tiny_diffusion_drafter(names["model"]).save_pretrained(tmp_path / "diffusion")
    hf_dart.detach(names["model"])
    given = {**names["inputs"], "max_new_tokens": 64}
    stock = names["model"].generate(**given)
    *others, own = blocks(ROOT / "docs" / "drafters.md")
    assert others
    for code in others:
        run(code, names, tmp_path)
        assert names.pop("drafter").last_stats.rounds > 0
    run(own, names, tmp_path)
    drafter = names["BigramDrafter"](names["text"])
    assert names["model"].generate(**given, assistant=drafter).equal(stock)
    assert drafter.last_stats.accepted > 0


def test_ngram_table(names: dict[str, Any], tmp_path: Path) -> None:
    build(["import os\nimport sys\n"] * 8, tmp_path / "all.ngram", tokenizer=names["tokenizer"])
    (code,) = blocks(ROOT / "docs" / "ngram_table.md")
    names["inputs"]["max_new_tokens"] = 12
    run(code, names, tmp_path)
    assert names["head"].last_stats.rounds > 0


@pytest.mark.matrix
def test_training(names: dict[str, Any], tmp_path: Path) -> None:
    for name in ("danish", "python"):
        head = DartHead.from_pretrained(str(PACKAGED_HEAD), target=names["model"])
        head.add_adapter(LoraConfig(r=2))
        head.save_pretrained(tmp_path / name / "final")
    row = '{"text": "import os, sys, re, json, math, time, random, string"}\n'
    (tmp_path / "answers.jsonl").write_text(row * 200, encoding="utf8")
    (adapters,) = blocks(ROOT / "docs" / "lora.md")
    training, _ = blocks(ROOT / "docs" / "training.md")
    for code in (adapters, training):
        run(code, names, tmp_path)
    assert (tmp_path / "head" / "final" / "model.safetensors").is_file()
    assert names["trainer"].state.global_step == 2


def test_training_on_images(names: dict[str, Any], tmp_path: Path) -> None:
    _, code = blocks(ROOT / "docs" / "training.md")
    model = seeing_target("llava").float()

    def processor(text: str, images: int, return_tensors: str) -> BatchFeature:
        return BatchFeature(sights("llava", rows=1, image=images))

    args = DartTrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none")
    head = DartHead.from_target(model, draft_length=4)
    names |= {"model": model, "processor": processor, "args": args, "head": head, "DartTrainer": DartTrainer}
    names["examples"] = [("text", 0), ("text", 1)]
    run(code.replace("max_new_tokens=256", "max_new_tokens=12, suppress_tokens=[47]"), names, tmp_path)
    assert names["trainer"].state.global_step == 2


def test_metrics_names_all_that_is_logged() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf8")
    names = {"loss", "agreement_1", *(f"eval_{name}" for name in ("loss", "tau_decoded", *DraftQuality.names(1)))}
    assert {name for name in names if f"| `{name}`" not in page} == set()


def test_losses_explains_all_that_can_be_chosen() -> None:
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf8")
    fields = {one.name for one in dataclasses.fields(Objective)}
    kinds = {f"`divergence: {one}`" for one in ("ce", "kl", "tv", "lk")}
    kinds |= {f"`position_weights: {one}`" for one in ("uniform", "exponential", "dpace")}
    kinds |= {f"`chain_form: {one}`" for one in ("linear", "log")}
    for shown in (*(f"`{name}`" for name in fields), *kinds, *(f"| `{preset}`" for preset in PRESETS)):
        assert shown in page, shown
    for shown in kinds:  # they can indeed be chosen
        name, _, value = shown.strip("`").partition(": ")
        Objective(**{name: value})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target
