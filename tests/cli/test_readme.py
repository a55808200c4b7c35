"""What README and docs show runs: their Python, word for word but for the names of models, and their links."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from support import tiny
from support.chats import chat_tokenizer
from support.modules import with_module
from support.multimodal import image_inputs, multimodal_target
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchFeature

import hf_dart
from hf_dart import DartHead
from hf_dart.cli import main, parser
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET
from hf_dart.training import DartTrainer, DartTrainingArguments
from hf_dart.training.objective.objective import PRESETS, Objective
from hf_dart.training.recipe import read_recipe
from hf_dart.training.trainers.evaluation import draft_figures
from hf_dart.trees.ngram.build import build

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
HEADS = ("someone/dart-qwen3-8b", "someone/dart-qwen3-4b", "z-lab/Qwen3-4B-DFlash-b16")
HEADS += ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",)


def blocks(page: Path, kind: str = "python") -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(encoding="utf8"), re.DOTALL | re.MULTILINE)


def run(code: str, names: dict[str, Any], folder: Path) -> None:
    stands_for = {
        **dict.fromkeys(('"Qwen/Qwen3-8B"', '"Qwen/Qwen3-4B"'), f'"{PACKAGED_TARGET}"'),
        **dict.fromkeys((f'"{name}"' for name in HEADS), f'"{PACKAGED_HEAD}"'),
        '"someone/diffusion-qwen3-8b"': f'"{folder}/diffusion"',
        '"Qwen/Qwen3-0.6B"': f'"{folder}/small"',
        '"runs/': f'"{folder}/',
        **{f'"{name}"': f'"{folder}/{name}"' for name in ("all.ngram", "texts.safetensors", "answers.jsonl")},
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
    return {"model": model, "tokenizer": tokenizer, "inputs": inputs, "DartHead": DartHead, "hf_dart": hf_dart}


def test_readme(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    first, *others = blocks(ROOT / "README.md")
    monkeypatch.chdir(ROOT)
    exec(compile(first, "README.md", "exec"), names)  # word for word
    assert float(capsys.readouterr().out) > 1
    names["drafter"].last_stats = None
    assert others
    for code in others:
        run(code, names, tmp_path)
    assert names["drafter"].last_stats.rounds > 0


# ---- shell commands ------------------------------------------------------------------------------------------

# Beginnings of those that do not run here, and why; the rest run, with the names and sizes of `tiny_command`.
NOT_RUN = {
    "python3 -m venv": "make an environment: .ci/run does",
    "pip install": "needs a package index: .ci/run does",
    "vllm serve": "needs vLLM and a GPU",
    "python examples/ray_serve/replicas.py": "needs Ray, and goes on until it is stopped",
    "python examples/experiments/surveys/originals.py": "needs other projects' code",
    "hf-dart train": "tests/training and test_training run recipes; their options are read here",
    "hf-dart generate --head runs/head/final": "uses what training left",
    "hf-dart convert runs/head/final": "likewise: tests/interop/test_vllm.py converts",
    "hf-dart bench": "takes minutes: tests/bench runs it; its options are read here",
    "python examples/experiments/drafts.py": "takes minutes",
    "python examples/experiments/headless.py": "takes minutes: tests/experiments runs a part",
    "hf-dart audit": "likewise",
    "hf-dart serve": "goes on until it is stopped: tests/serve",
    "hf-dart ngram build code.ngram --dataset": "needs the Hub; its options are read here",
    "hf-dart push": "needs the Hub: tests/hub/test_publish.py has one; its options are read here",
}


def commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks."""
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line]


LINES = [(page.name, line) for page in PAGES if page.name != "CONTRIBUTING.md" for line in commands(page)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the commands name."""
    folder = tmp_path_factory.mktemp("commands")
    shutil.copytree(PACKAGED_TARGET, folder / "target")
    chat_tokenizer().save_pretrained(folder / "target")
    (folder / "src").mkdir()
    for name in ("a", "b"):
        (folder / "src" / f"{name}.py").write_text("import os\nimport sys\n" * 20)
    (folder / "prompts.jsonl").write_text('{"text": "import os, sys, re, json, math, time, random, string"}\n' * 4)
    for name in ("all", "machine-1", "machine-2"):
        build(["import os\nimport sys\n"] * 8, folder / f"{name}.ngram", tokenizer=chat_tokenizer())
    return folder


def tiny_command(line: str, place: Path) -> list[str]:
    """The words of a command, with the packaged pair, and a chat template, in place of what is on the Hub."""
    words = shlex.split(line, comments=True)[1:]
    stands_for = {"Qwen/Qwen3-8B": str(place / "target"), "Qwen/Qwen3-4B": str(place / "target")}
    stands_for |= dict.fromkeys(HEADS, str(PACKAGED_HEAD)) | {"someone/prompts": "prompts.jsonl", "FILES": "src/a.py"}
    words = [one for word in words for one in (sorted(glob(word)) or [stands_for.get(word, word)])]
    if words[0] in ("generate", "view"):
        words += ["--max-new-tokens", "8", "--dtype", "float32"]
    if words[0] == "regenerate":
        words += ["--length", "24", "--prefix", "4", "8", "--rows", "4", "--batch-size", "4"]
    return words


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page}-{line[:50]}" for page, line in LINES])
def test_commands(page: str, line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    if not line.startswith("hf-dart "):
        assert line.startswith(tuple(NOT_RUN)), f"{page}: {line}"
    elif not line.startswith(tuple(NOT_RUN)):
        assert main(tiny_command(line, place)) == 0
    elif not line.startswith("hf-dart train"):
        parser().parse_args(tiny_command(line, place))
    elif "..." not in line:
        words = line.replace("examples/", f"{ROOT}/examples/").partition(" # ")[0]
        read_recipe(shlex.split(words)[2:])


def test_commands_that_do_not_run_are_still_there() -> None:
    lines = [line for _, line in LINES]
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in lines)] == []


def test_recipes(tmp_path: Path) -> None:
    (recipe,) = blocks(ROOT / "docs" / "training.md", "yaml")
    (tmp_path / "recipe.yaml").write_text(recipe.replace("bf16: true", "bf16: false\nuse_cpu: true"))
    assert read_recipe([str(tmp_path / "recipe.yaml")]).training.max_steps == 20000


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf8").splitlines()) <= 150


def test_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    first, by_default, many, memory, grammar, mixed = blocks(ROOT / "docs" / "use.md")
    run(first, names, tmp_path)
    assert float(capsys.readouterr().out) > 1
    names["head"].last_stats = None
    run(by_default, names, tmp_path)
    assert names["head"].last_stats.rounds > 0
    assert "generate" not in vars(names["model"])
    run(many, names, tmp_path)
    for seed, output in ((7, names["request"].result()), (0, names["outputs"][0])):
        torch.manual_seed(seed)
        assert output.equal(names["model"].generate(**names["inputs"], **names["options"]))
    run(memory, names, tmp_path)
    assert names["store"].names == ["ada"]
    if find_spec("xgrammar"):
        run(grammar, {**names, "model": hf_dart.attach(names["model"])}, tmp_path)
        assert names["head"].last_stats.tau > 1
    run(mixed, {**names, "model": hf_dart.attach(names["model"])}, tmp_path)
    assert names["head"].last_stats.tau > 1


def test_drafters(names: dict[str, Any], tmp_path: Path) -> None:
    tiny.tiny_diffusion_drafter(names["model"]).save_pretrained(tmp_path / "diffusion")
    shutil.copytree(PACKAGED_TARGET, tmp_path / "small")
    hf_dart.detach(names["model"])
    given = {**names["inputs"], "max_new_tokens": 64}
    stock = names["model"].generate(**given)
    *others, own = blocks(ROOT / "docs" / "drafters.md")
    assert others
    for code in others:
        # The packaged target has no module of its own.
        has = {"model": with_module("glm4_moe", tmp_path / "glm")[0], "inputs": tiny.prompts([7])}
        made = {**names, **(has if "MtpDrafter" in code else {})}
        run(code, made, tmp_path)
        assert made["drafter"].last_stats.rounds > 0
    run(own, names, tmp_path)
    drafter = names["BigramDrafter"](names["text"])
    assert names["model"].generate(**given, assistant=drafter).equal(stock)
    assert drafter.last_stats.accepted > 0


def test_what_is_no_code_has_gaps() -> None:
    for page in PAGES:
        for block in blocks(page, "text"):
            assert "..." in block or page.name == "CONTRIBUTING.md", f"{page.name}: {block}"


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


def test_learning(names: dict[str, Any], tmp_path: Path) -> None:
    (code,) = blocks(ROOT / "docs" / "learning.md")
    run(code, names, tmp_path)
    assert names["learner"].stats.tokens == 24
    assert (tmp_path / "learnt" / "model.safetensors").is_file()


def test_training_on_images(names: dict[str, Any], tmp_path: Path) -> None:
    _, code = blocks(ROOT / "docs" / "training.md")
    model = multimodal_target("llava").float()

    def processor(text: str, images: int, return_tensors: str) -> BatchFeature:
        return BatchFeature(image_inputs("llava", rows=1, image=images))

    args = DartTrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none")
    head = DartHead.from_target(model, draft_length=4)
    names |= {"model": model, "processor": processor, "args": args, "head": head, "DartTrainer": DartTrainer}
    names["examples"] = [("text", 0), ("text", 1)]
    run(code.replace("max_new_tokens=256", "max_new_tokens=12, suppress_tokens=[47]"), names, tmp_path)
    assert names["trainer"].state.global_step == 2


def test_metrics_names_all_that_is_logged() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf8")
    evaluated = ("loss", "tau_decoded", "tau_edited", *draft_figures(np.ones(6)))
    names = {"loss", "agreement_1", *(f"eval_{name}" for name in evaluated)}
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
