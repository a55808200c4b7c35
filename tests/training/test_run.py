"""`hf-dart train`: a recipe and flags to a head that loads, and one sentence for what cannot be used."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.tiny import tiny_head, tiny_target
from support.tiny_training import changed
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dart import DartHead, DiffusionDrafter, EagleDrafter, TreeConfig
from hf_dart.bench.pair import target_of
from hf_dart.cli import main
from hf_dart.hub.card import render_card
from hf_dart.hub.facts import HeadFacts, publishable
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET
from hf_dart.training.run import _reduce_vocabulary, checkpoint_of

TEXT = "\n".join(f"def function_{i}(argument):\n    return argument + {i}\n" for i in range(12))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A run of a few seconds on the packaged target."""
    data = tmp_path / "data"
    data.mkdir()
    for part in range(3):
        (data / f"{part}.txt").write_text(TEXT[part:], encoding="utf8")
    options = {
        "train_data": [str(data)], "eval_documents": 1, "cache_dir": str(tmp_path / "cache"), "max_length": 48,
        "draft_length": 3, "feature_layers": [2, 8], "draft_vocab_size": 20, "tree": {"nodes": 8},
        "output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 2, "anchors_per_row": 4,
        "learning-rate": "1e-3", "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2,
        "disable_tqdm": True, "warmup_steps": None, "include_num_input_tokens_seen": "all",
    }  # fmt: skip
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(options), encoding="utf8")
    return file


def run_of(recipe: Path) -> Path:
    return recipe.parent / "run"


def test_a_recipe_gives_a_head_and_goes_on_where_it_stopped(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(recipe)
    words = ["--hub_token", "hf_secret", "--max_steps", "2", "--decode-prompts", "1", "--decode_prompt_tokens=4"]
    assert main(["train", str(recipe), *words]) == 0
    shown = capsys.readouterr().err
    assert all(said in shown for said in (str(run / "final"), "tau", f"\n  hf-dart bench --head {run / 'final'}\n"))
    assert re.search(r"The draft vocabulary of 20 tokens covers \d\d\.\d% of the text", shown)
    assert target_of(str(run / "final")) == yaml.safe_load(recipe.read_text()).get("target", "packaged")
    assert {file.name for file in run.iterdir()} == {"checkpoint-2", "final", "recipe.yaml"}
    written = yaml.safe_load((run / "recipe.yaml").read_text())
    assert {"max_steps": 2, "learning_rate": 1e-3}.items() <= written.items()
    assert not {"warmup_steps", "hub_token"} & written.keys()
    record = json.loads((run / "final" / "training.json").read_text())
    assert (record["steps"], record["tokens"]) == (2, 2 * 2 * 48)
    state = json.loads((run / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["log_history"][-1]["num_input_tokens_seen"] == record["tokens"]
    assert {"eval_tau", "eval_tau_decoded"} <= record["evaluation"].keys()
    assert record["recipe"] == publishable(written)  # what everybody may read
    assert (written["output_dir"], record["recipe"]["train_data"]) == (str(run), ["data"])
    card = render_card(HeadFacts.read(run / "final"))
    assert all(said in card for said in ("\ntrain_data:\n- data\n", "\nlearning_rate: 0.001\n"))
    assert "secret" not in card

    target = AutoModelForCausalLM.from_pretrained(PACKAGED_TARGET, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED_TARGET)
    head = DartHead.from_pretrained(str(run / "final"), target=target, tokenizer=tokenizer)
    assert (head.draft_length, head.feature_layers, head.tree_config) == (3, [2, 8], TreeConfig(nodes=8))
    assert (head.config.draft_vocab_size, head.draft_window) == (20, 48)  # the length of a row
    assert tokenizer.eos_token_id in head.draft_vocabulary
    untrained = DartHead.from_target(target, draft_length=3, feature_layers=[2, 8])
    assert not torch.equal(head.fc.weight, untrained.fc.weight)

    left = run / "left"
    (left / "checkpoint-1").mkdir(parents=True)
    (left / "recipe.yaml").write_text("max_steps: 1")
    assert checkpoint_of(str(left), None) is None  # nothing of a run that ended before its first checkpoint is lost
    resumed = ["--resume_from_checkpoint"]
    for more, says in (([], "is not empty"), ([*resumed, "--draft_length", "2"], "draft_length=3 and this run 2")):
        assert main(["train", str(recipe), *more]) == 2
        assert says in capsys.readouterr().err
    assert main(["train", str(recipe), *resumed]) == 0
    assert json.loads((run / "final" / "training.json").read_text())["steps"] == 4
    assert json.loads((run / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4


def change(recipe: Path, *without: str, **options: Any) -> None:
    """Write the recipe again without some options, and with others."""
    kept = {name: value for name, value in yaml.safe_load(recipe.read_text()).items() if name not in without}
    recipe.write_text(yaml.safe_dump({**kept, "eval_strategy": "no", "max_steps": 1, **options}))


def loaded(folder: Path, kind: Any = DartHead) -> Any:
    target = AutoModelForCausalLM.from_pretrained(PACKAGED_TARGET, dtype=torch.float32)
    return kind.from_pretrained(str(folder), target=target)


def test_a_diffusion_drafter_is_trained_and_trained_on(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(recipe, "draft_vocab_size", drafter="diffusion", num_layers=1, save_steps=1)
    assert main(["train", str(recipe), "--denoise-steps", "2"]) == 0
    final = run_of(recipe) / "final"
    drafter = loaded(final, DiffusionDrafter)
    assert (drafter.draft_length, drafter.feature_layers, drafter.denoise_steps) == (3, [2, 8], 2)
    assert json.loads((final / "training.json").read_text())["recipe"]["drafter"] == "diffusion"
    assert main(["train", str(recipe), "--resume_from_checkpoint"]) == 2
    assert "denoise_steps=2 and this run 1" in capsys.readouterr().err

    on = recipe.parent / "on"
    change(recipe, head=str(final), output_dir=str(on))
    assert main(["train", str(recipe), "--unmasking", "left_to_right", "--revealed_share", "1"]) == 0
    after = loaded(on / "final", DiffusionDrafter)
    assert after.unmasking == "left_to_right"
    assert not torch.equal(after.mask_token.weight, drafter.mask_token.weight)


def test_an_eagle_head_is_trained_on_a_stream_to_draft_some_tokens_alone(recipe: Path) -> None:
    change(recipe, drafter="eagle", max_steps=2, streaming=True)
    assert main(["train", str(recipe)]) == 0
    drafter = loaded(run_of(recipe) / "final", EagleDrafter)
    assert (len(drafter.draft_vocabulary), drafter.logits(torch.ones(1, 256)).shape) == (20, (1, 20))
    others = recipe.parent / "others.txt"
    others.write_text("Some other words.\n" * 40, encoding="utf8")
    options = {"head": str(run_of(recipe) / "final"), "output_dir": str(recipe.parent / "on")}
    change(recipe, drafter="eagle", train_data=[str(others)], eval_documents=0, **options)
    assert main(["train", str(recipe)]) == 0  # by the same recipe, on other text
    assert torch.equal(loaded(recipe.parent / "on" / "final", EagleDrafter).draft_vocabulary, drafter.draft_vocabulary)


@pytest.mark.gpu
def test_tokens_are_counted_for_a_head_on_a_gpu() -> None:
    head = tiny_head(tiny_target("qwen3", dtype=torch.float32).to("cuda"))
    assert _reduce_vocabulary(head, 2, [{"input_ids": [5, 5, 5, 7, 7, 8, 9, 9]}], eos=8) == 4 / 8
    assert head.draft_vocabulary.tolist() == [5, 8]


def test_edit_passes_and_a_copied_layer_are_trained_by_the_command(recipe: Path) -> None:
    change(recipe, drafter="edit", max_steps=2)
    assert main(["train", str(recipe)]) == 0
    head = loaded(run_of(recipe) / "final")
    assert head.refines
    assert head.editor.correction.weight.abs().sum() > 0
    on = recipe.parent / "on"
    options = {"drafter": "dart", "copy_layer": 7, "lora_rank": 2, "output_dir": str(on)}
    change(recipe, "feature_layers", "draft_vocab_size", **options)
    assert main(["train", str(recipe)]) == 0
    assert loaded(on / "final").config.copied_layer == 7


@pytest.mark.parametrize("lora", [False, True])
def test_a_part_of_a_given_head_is_trained(recipe: Path, lora: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Its selector, or an adapter, which a run of more steps goes on with; its tree is changed, too."""
    final = run_of(recipe) / "final"
    adapter = {"lora_rank": 2, "save_steps": 1, "muon_learning_rate": 1e-3}
    part = adapter if lora else {"selector_only": True, "gamma": 0.8}
    change(recipe, "draft_length", "feature_layers", "draft_vocab_size", "tree", head="packaged", **part)
    given = recipe.with_suffix(".json")
    given.write_text(json.dumps(yaml.safe_load(recipe.read_text())))
    for wrong in ('{"node": 8}', '{"nodes": 0}'):
        assert main(["train", str(given), "--tree", wrong]) == 2
        assert "node" in capsys.readouterr().err
        assert not run_of(recipe).exists()
    assert main(["train", str(given), "--tree", '{"nodes": 9}']) == 0
    if lora:
        assert not (final / "model.safetensors").exists()
        resumed = ["--tree", '{"nodes": 9}', "--resume_from_checkpoint", "--max_steps", "2"]
        assert main(["train", str(given), *resumed]) == 0
        head = loaded(final)
        assert head.adapted
        assert any(value.abs().max() > 0 for name, value in head.state_dict().items() if "lora_B" in name)
        return
    head, before = loaded(final), loaded(PACKAGED_HEAD).state_dict()
    assert head.tree_config.nodes == 9
    assert changed(head, before)
    assert all(name.startswith("selector.") for name in changed(head, before))


def test_mistakes_get_one_sentence_and_write_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, says in (
        (["--max_step", "3"], "did you mean 'max_steps'?"),
        (["--max_steps", "ten"], "invalid int value: 'ten'"),
        (["--loss", "mse"], "one of dart, left_to_right"),
        (["--include_num_input_tokens_seen", "some"], "invalid choice: 'some'"),
        (["more.yaml"], "'more.yaml' belongs to no option"),
        (["--quantization", "4bit"], "give a JSON object"),
        (["--head", str(PACKAGED_HEAD)], "draft_length 3 shapes a new head"),
        (["--selector_only", "--loss", "dart"], "name it with head"),
        (["--feature_layers", "99"], "feature_layers has 99, and the target's"),
        (["--resume_from_checkpoint"], "holds no checkpoint"),
        (["--resume_from_checkpoint", "./elsewhere"], "is no checkpoint"),
        (["--train_data", "./nothing.txt"], "There is no file or folder ./nothing.txt"),
        (["--tree", '{"node": 8}'], "TreeConfig, which has no 'node'; did you mean 'nodes'?"),
        (["--selector_rank", "8"], "only selector_only trains"),
        (["--drafter", "foo", "--help"], "drafter is 'foo'"),
        (["--output_dir", f"{PACKAGED_HEAD}/config.json/run"], "Not a directory"),
        (["--report_to", "clearml"], "Install what is missing, or leave out the option that asks for it: ClearML"),
        (["--learning_rate=-1"], "learning_rate is -1.0; give 0 or more"),
        (["--neftune_noise_alpha", "5"], "Drafters are trained without neftune_noise_alpha; leave it out"),
        (["--debug", "underflow_overflow"], "without debug; leave it out"),
        (["--early_stopping_patience", "2", "--eval_strategy", "no"], "counts evaluations; give eval_strategy"),
        (["--metric_for_best_model", "eval_tao"], "Evaluations give no 'tao'; did you mean 'tau'?"),
        (["--adam_beta1", "2"], "Invalid beta parameter"),
    ):
        assert main(["train", str(recipe), *words]) == 2
        shown = capsys.readouterr().err.splitlines()
        assert shown[-1].startswith("hf-dart: ")
        assert says in shown[-1]
        assert not [*run_of(recipe).glob("*")]

    def lacking(words: list[str]) -> None:
        raise PackageNotFoundError("deepspeed>=0.9.3")

    monkeypatch.setattr("hf_dart.training.recipe.read_recipe", lacking)
    assert main(["train", str(recipe), "--deepspeed", "x.json"]) == 2
    assert "Install what is missing, or leave out the option that asks for it: No package" in capsys.readouterr().err
