"""Which pair the command line works with, when it names a target alone, a head alone, or the packaged ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.sentences import assert_command_says, refused

from hf_dart import LookupDrafter
from hf_dart.bench.pair import load_pair, target_of
from hf_dart.cli import main
from hf_dart.errors import UserError
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET

TARGET = str(PACKAGED_TARGET)


def trained(folder: Path, recipe: object, **config: object) -> str:
    """A head in a folder as `hf-dart train` leaves it."""
    shutil.copytree(PACKAGED_HEAD, folder)
    fields = json.loads((folder / "config.json").read_text(encoding="utf8"))
    (folder / "config.json").write_text(json.dumps({**fields, **config}), encoding="utf8")
    if recipe is not None:
        (folder / "training.json").write_text(json.dumps({"steps": 1, "recipe": recipe}), encoding="utf8")
    return str(folder)


@pytest.mark.parametrize(("target", "head"), [(None, None), ("packaged", None), (None, "packaged"), ("packaged",) * 2])
def test_the_packaged_pair(target: str | None, head: str | None) -> None:
    pair = load_pair(target, head)
    assert (pair.target_name, pair.head_name) == ("packaged target", "packaged head")
    assert str(pair.model.dtype) == "torch.float32"


def test_a_target_without_a_head_drafts_copied_text(capsys: pytest.CaptureFixture[str]) -> None:
    pair = load_pair(TARGET)
    assert isinstance(pair.head, LookupDrafter)
    assert pair.added_parameters(pair.head) == 0
    words = ["--target", TARGET, "import os\nimport os\nimport os\n", "--max-new-tokens", "24"]
    assert main(["generate", *words, "--stats"]) == 0
    drafted = capsys.readouterr()
    assert "drafts accepted" in drafted.err
    assert main(["generate", *words, "--stock"]) == 0
    assert capsys.readouterr().out == drafted.out
    assert_command_says(["profile", "--target", TARGET], "name a head with --head.", capsys)


def test_a_server_without_its_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hf_dart.cli.serve.find_spec", lambda name: None)
    assert_command_says(["serve"], "pip install -e '.[serve]' in the clone", capsys)


def test_a_head_alone_brings_the_target_of_its_training(tmp_path: Path) -> None:
    assert target_of(trained(tmp_path / "packaged", {"max_steps": 2})) == "packaged"
    assert target_of(trained(tmp_path / "named", {"target": "packaged"})) == "packaged"
    assert target_of(trained(tmp_path / "folder", {"target": TARGET})) == TARGET
    final = trained(tmp_path / "run" / "final", {"target": "folder"})  # local folders are not published
    (tmp_path / "run" / "recipe.yaml").write_text(f"target: {TARGET}", encoding="utf8")
    assert target_of(final) == TARGET
    assert target_of(trained(tmp_path / "hub", None, target_name="them/tiny")) == "them/tiny"
    pair = load_pair(None, trained(tmp_path / "head" / "final", {"target": TARGET}))
    assert (pair.target_name, pair.head_name) == ("demo_pair model", "head")


def test_the_target_of_auto_is_asked_for() -> None:
    refused(lambda: load_pair(None, "auto"), UserError, r"^--head auto is .* known for a target; give --target, too\.$")


@pytest.mark.parametrize("recipe", [None, {"target": "/nowhere"}, {"target": 3}])
def test_a_target_that_is_not_known_is_asked_for(recipe: object, tmp_path: Path) -> None:
    head = trained(tmp_path / "head", recipe)
    refused(lambda: target_of(head), UserError, r"give --target, the model that it was made for\.$")
