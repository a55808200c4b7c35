"""Recipes: options of a file and flags, read and refused alike."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from hf_dart import DartConfig
from hf_dart.cli import main
from hf_dart.drafters.diffusion.drafter import DiffusionConfig
from hf_dart.training.recipe import read_recipe
from hf_dart.training.trainers.arguments import HeadArguments
from hf_dart.training.trainers.diffusion import DiffusionArguments


def test_flags_override_a_recipe_and_mistakes_in_it_are_refused(tmp_path: Path) -> None:
    gemma = read_recipe([str(Path(__file__).parents[2] / "examples" / "gemma3_270m" / "head.yaml")])
    assert gemma.training.max_steps * gemma.training.per_device_train_batch_size * gemma.data.max_length > 4e6
    file = tmp_path / "recipe.yaml"
    given = {"output_dir": "runs", "train_data": ["a.txt"], "learning-rate": "1e-3", "warmup_steps": None}
    file.write_text(yaml.safe_dump({**given, "max_steps": 4, "tree": {"nodes": 8}}))
    options = read_recipe([str(file), "--max_steps", "7", "--feature-layers", "1", "2", "3", "--no_packing"])
    assert (options.training.max_steps, options.training.learning_rate) == (7, 1e-3)
    assert options.head.config() == {"feature_layers": [1, 2, 3], "tree": {"nodes": 8}}
    assert not options.data.packing
    assert options.given["packing"] is False
    assert "warmup_steps" not in options.given
    file.write_text(yaml.safe_dump({"output_dir": str(tmp_path), "train_data": ["a.txt"], "fsdp": False}))
    assert read_recipe([str(file)]).training.fsdp in (False, None)  # in a recipe it is a word
    assert read_recipe([str(file), "--fsdp", "true"]).training.fsdp is True
    file.write_text("output_dir: x\ntrain_data: [a.txt]\nsave_strategy: no")  # of which YAML makes false
    assert read_recipe([str(file)]).training.save_strategy == "no"
    saving = ["--output_dir", "x", "--train_data", "a.txt", "--eval_strategy", "steps", "--eval_steps", "150"]
    for patience, steps, saved in (("3", "100", 150), ("3", "300", 300), ("0", "100", 100)):
        training = read_recipe([*saving, "--early_stopping_patience", patience, "--save_steps", steps]).training
        assert (training.save_steps, training.load_best_model_at_end) == (saved, patience == "3")
    for content, says in (
        ("train_dat: [x]", "did you mean 'train_data'?"),
        ("zzzzzzzz: 1", "--help' lists all"),
        ("drafter: eagle\nlora_rank: 4", "it is one of --drafter dart, and this is --drafter eagle"),
        ("train_data: [x]", "output_dir is missing"),
        ("output_dir: x", "required: --train_data"),
        ("- a list", "holds no options"),
        ("a: [", "Cannot read the recipe"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=re.escape(says)):
            read_recipe([str(file)])


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a new drafter are fields of its config."""
    for options, config in ((HeadArguments, DartConfig), (DiffusionArguments, DiffusionConfig)):
        names = {one.name for one in fields(options)} - {"drafter", "head"}
        assert names <= {one.name for one in fields(config)}
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("--train_data", "--draft_length", "--loss", "--target", "RECIPE"))
    assert "--revealed_share" not in shown
    assert main(["train", "--drafter", "diffusion", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("--train_data", "--revealed_share", "--denoise_steps"))
    assert "--selector_rank" not in shown
    assert main(["train", "--drafter=ngram", "--output_dir", "runs"]) == 2
    assert "drafter is 'ngram'; give one of dart, diffusion, eagle, edit." in capsys.readouterr().err
