"""LoRA on heads: files, switching, merging, training, and where heads lie, as their adapters name it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from support import tiny_training
from support.cases import GREEDY, SAMPLED
from support.compare import assert_identical, tally
from support.heads import drafts, shaken
from support.hub import Hub
from support.hub import hub as hub
from support.sentences import refused
from support.tiny import prompts, tiny_head
from support.tiny_training import tiny_trainer, token_rows
from transformers import HfArgumentParser

from hf_dart import DartHead
from hf_dart.training.run import apply_lora
from hf_dart.training.trainers.arguments import LoraArguments
from hf_dart.training.trainers.edit import EditTrainer, EditTrainingArguments

EXACT = tally("float64, heads with adapters", least=1.05)


@pytest.fixture(scope="module")
def base(target: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("base")
    tiny_head(target, num_layers=2, selector_rank=4).save_pretrained(path)
    return str(path)


def adapter(target: Any, base: str, folder: Path, seed: int = 1, **config: Any) -> str:
    head = DartHead.from_pretrained(base, target=target)
    head.add_adapter(LoraConfig(r=2, lora_alpha=4, **config))
    shaken(head, seed).save_pretrained(folder)
    return str(folder)


# ---- files ------------------------------------------------------------------------------------------------


def test_a_folder_holds_the_adapter_alone_and_brings_its_head(target: Any, base: str, tmp_path: Path) -> None:
    head = DartHead.from_pretrained(base, target=target)
    plain = drafts(head)
    head.add_adapter(LoraConfig(r=2))
    torch.testing.assert_close(drafts(head), plain)  # a new adapter changes nothing
    shaken(head).save_pretrained(tmp_path)
    files = {"adapter_config.json", "adapter_model.safetensors", "config.json"}
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == files
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
    assert all("lora_" in name or name.endswith("mask_slot.weight") for name in names)
    loaded = DartHead.from_pretrained(str(tmp_path), target=target)
    assert loaded.active_adapters() == ["default"]
    assert torch.equal(drafts(loaded), drafts(head))
    assert (drafts(loaded) - plain).abs().max() > 1e-2
    for options in (GREEDY, SAMPLED):
        assert_identical(target, loaded, prompts([9, 4, 7]), **options, into=EXACT)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT's wrapper asks for it
def test_an_adapter_that_peft_wrote(target: Any, base: str, tmp_path: Path) -> None:
    from peft import PeftModel, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["fc"])
    wrapped = get_peft_model(DartHead.from_pretrained(base, target=target), config)
    shaken(wrapped)  # type: ignore[arg-type]
    wrapped.save_pretrained(tmp_path)
    loaded = DartHead.from_pretrained(str(tmp_path), target=target)
    assert torch.equal(drafts(loaded), drafts(wrapped.get_base_model()))
    ours = tmp_path / "ours"
    again = PeftModel.from_pretrained(DartHead.from_pretrained(base, target=target), adapter(target, base, ours))
    loaded = DartHead.from_pretrained(str(ours), target=target)
    torch.testing.assert_close(drafts(again.get_base_model()), drafts(loaded), rtol=1e-14, atol=1e-14)


def test_the_base_may_lie_elsewhere(target: Any, base: str, tmp_path: Path) -> None:
    path = adapter(target, base, tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    content = json.loads(config.read_text())
    for said, word in ((str(tmp_path / "gone"), "not there"), (None, "does not name")):
        config.write_text(json.dumps({**content, "base_model_name_or_path": said}))
        refused(lambda: DartHead.from_pretrained(path, target=target), ValueError, f"{word}.*base=")
        DartHead.from_pretrained(path, target=target, base=base)
    refused(lambda: DartHead.from_pretrained(base, target=target, base=base), ValueError, "holds none")


def test_what_is_wrong_with_files_is_one_sentence(target: Any, base: str, tmp_path: Path) -> None:
    path = Path(adapter(target, base, tmp_path / "adapter"))
    head = DartHead.from_pretrained(base, target=target)
    plain = drafts(head)
    weights, config = path / "adapter_model.safetensors", path / "adapter_config.json"
    good, said = weights.read_bytes(), config.read_text()

    def spoilt(word: str) -> None:
        refused(lambda: head.load_adapter(str(path)), ValueError, word)
        assert not head.adapted
        assert torch.equal(drafts(head), plain)

    weights.write_bytes(good[:-50])
    spoilt("truncated or damaged")
    weights.unlink()
    spoilt("no adapter_model.safetensors")
    weights.write_bytes(good)
    for content, words in ((json.dumps({**json.loads(said), "r": 3}), "does not fit"), (said[:-20], "read as JSON")):
        config.write_text(content)
        spoilt(words)
    config.unlink()
    spoilt("holds no adapter_config.json")
    config.write_text(said)
    other = tmp_path / "other"
    tiny_head(target, num_layers=2, selector_rank=4, seed=3).save_pretrained(other)
    refused(lambda: DartHead.from_pretrained(str(path), target=target, base=str(other)), ValueError, "another head")
    head.load_adapter(str(path))
    refused(lambda: head.load_adapter(str(path)), ValueError, "already")


def test_what_takes_no_adapter(target: Any, base: str) -> None:
    refused(lambda: tiny_head(target).add_adapter(LoraConfig()), ValueError, "is in no folder")
    head = DartHead.from_pretrained(base, target=target)
    for wrong in ({"target_modules": ["q_proj", "w1"]}, {"modules_to_save": ["mask_token"]}):
        refused(lambda wrong=wrong: head.add_adapter(LoraConfig(**wrong)), ValueError, "no module '(w1|mask_token)'")
    refused(head.merge_adapter, ValueError, "no adapter to merge")
    refused(lambda: head.set_adapter("python"), ValueError, "no adapter 'python'")


def test_the_draft_vocabulary_goes_with_the_adapter(target: Any, base: str, tmp_path: Path) -> None:
    some = [3, 7, 11, 30]
    trained = DartHead.from_pretrained(base, target=target).reduce_vocabulary(some)
    copied = tiny_head(target, copy_layer=1, feature_layers=[1], draft_vocabulary=some)
    for number, head in enumerate((trained, copied)):
        folder = tmp_path / str(number)
        head.add_adapter(LoraConfig(r=2))
        shaken(head).save_pretrained(folder)
        loaded = DartHead.from_pretrained(str(folder), target=target)
        assert loaded.draft_vocabulary.tolist() == some
        assert torch.equal(drafts(loaded), drafts(head))
    (folder / "draft_vocabulary.safetensors").unlink()
    refused(lambda: DartHead.from_pretrained(str(folder), target=target), ValueError, "no draft_vocabulary")
    for fields, vocabulary in (({"own_lm_head": True}, list(range(9))), ({}, None)):
        tiny_head(target, draft_vocab_size=9, **fields).save_pretrained(tmp_path / "few")
        head = DartHead.from_pretrained(str(tmp_path / "few"), target=target)
        if vocabulary is None:
            head.reduce_vocabulary(None)
        head.add_adapter(LoraConfig(r=2))
        shaken(head).save_pretrained(folder)
        loaded = DartHead.from_pretrained(str(folder), target=target)
        assert vocabulary == (None if loaded.draft_vocabulary is None else loaded.draft_vocabulary.tolist())
        assert torch.equal(drafts(loaded), drafts(head))


# ---- several ----------------------------------------------------------------------------------------------


def test_adapters_are_switched_at_run_time(target: Any, base: str, tmp_path: Path) -> None:
    """Also those that train other whole modules; no call has to attach the head again."""
    paths = {
        "python": adapter(target, base, tmp_path / "1", target_modules=["q_proj"], modules_to_save=["selector"]),
        "danish": adapter(target, base, tmp_path / "2", seed=2),
    }
    alone = {name: drafts(DartHead.from_pretrained(path, target=target)) for name, path in paths.items()}
    head = DartHead.from_pretrained(base, target=target)
    plain = drafts(head)
    for name, path in paths.items():
        head.load_adapter(path, name)
    for name in ("python", "danish", "python"):
        head.set_adapter(name)
        assert torch.equal(drafts(head), alone[name])
        assert_identical(target, head, prompts([7, 4]), **SAMPLED, into=EXACT)
    head.disable_adapters()
    assert torch.equal(drafts(head), plain)
    head.enable_adapters()
    assert torch.equal(drafts(head), alone["python"])
    assert (alone["python"] - alone["danish"]).abs().max() > 1e-2
    whole = adapter(target, base, tmp_path / "3", modules_to_save=["norm"], target_modules=["k_proj", "q_proj"])
    head.load_adapter(whole, "whole")
    for clash in ({"modules_to_save": ["fc"], "target_modules": ["q_proj"]}, {"target_modules": ["norm"]}):
        refused(lambda clash=clash: head.add_adapter(LoraConfig(**clash), "clash"), ValueError, "PEFT can put on")
    head.set_adapter("danish")
    assert torch.equal(drafts(head), alone["danish"])


def test_dropout_of_lora_never_moves_the_generator(target: Any, base: str, tmp_path: Path) -> None:
    """An adapter works in the head's mode from the start; in train mode, dropout is refused as the target's is."""
    head = DartHead.from_pretrained(base, target=target)
    head.add_adapter(LoraConfig(r=2, lora_dropout=0.5))
    shaken(head).save_pretrained(tmp_path)
    loaded = DartHead.from_pretrained(base, target=target)
    loaded.load_adapter(str(tmp_path))
    for each in (head, loaded):
        for options in (GREEDY, SAMPLED):
            assert_identical(target, each, prompts([7, 4]), **options, into=EXACT)
    refused(lambda: target.generate(**prompts([7]), assistant=head.train(), **GREEDY), ValueError, "train mode")


def test_a_merged_head_is_a_head(target: Any, base: str, tmp_path: Path) -> None:
    head = DartHead.from_pretrained(adapter(target, base, tmp_path / "adapter"), target=target)
    adapted = drafts(head)
    head.merge_adapter()
    assert not head.adapted
    assert not any("lora" in name or "base_layer" in name for name in head.state_dict())
    torch.testing.assert_close(drafts(head), adapted, rtol=1e-10, atol=1e-10)
    head.save_pretrained(tmp_path / "merged")
    assert torch.equal(drafts(DartHead.from_pretrained(str(tmp_path / "merged"), target=target)), drafts(head))
    head.add_adapter(LoraConfig(r=1))  # it lies somewhere again


def test_arguments_are_flags(target: Any, base: str) -> None:
    (arguments,) = HfArgumentParser(LoraArguments).parse_args_into_dataclasses(  # type: ignore[arg-type]
        ["--lora_rank", "3", "--lora_targets", "q_proj", "fc", "--copy_layer", "1"]
    )
    assert arguments.copy_layer == "1"
    head = apply_lora(DartHead.from_pretrained(base, target=target), arguments)
    config = head.peft_config["default"]
    assert (config.r, config.lora_alpha, set(config.target_modules)) == (3, 6, {"q_proj", "fc"})
    assert not apply_lora(DartHead.from_pretrained(base, target=target), LoraArguments()).adapted
    for wrong in (LoraArguments(lora_rank=0), LoraArguments(lora_rank=2, lora_dropout=1.5)):
        with pytest.raises(ValueError):  # noqa: PT011  PEFT's and torch's own
            apply_lora(DartHead.from_pretrained(base, target=target), wrong)


# ---- where heads lie ------------------------------------------------------------------------------------------


def base_of(folder: Path) -> str:
    return json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]


def test_an_adapter_names_the_folder_that_holds_its_head(target: Any, tmp_path: Path) -> None:
    head = tiny_head(target)
    head.save_pretrained(tmp_path / "first")
    head = shaken(DartHead.from_pretrained(str(tmp_path / "first"), target=target))
    refused(lambda: head.add_adapter(LoraConfig(r=2)), ValueError, "other weights than the one in.*save_pretrained")
    head.save_pretrained(tmp_path / "second")
    shutil.move(tmp_path / "second", tmp_path / "moved")
    refused(lambda: head.add_adapter(LoraConfig(r=2)), ValueError, "in no folder")
    head.save_pretrained(tmp_path / "second", max_shard_size="10KB")
    head.add_adapter(LoraConfig(r=2))
    head.save_pretrained(tmp_path / "adapter")
    assert base_of(tmp_path / "adapter") == str(tmp_path / "second")
    loaded = DartHead.from_pretrained(str(tmp_path / "adapter"), target=target)
    torch.testing.assert_close(drafts(loaded), drafts(head))


def test_a_checkpoint_has_its_final_name(tmp_path: Path) -> None:
    target = tiny_training.tiny_target()
    head = tiny_training.tiny_head(target)
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = tiny_trainer(tmp_path / "run", head, target, token_rows([[24], [24]]), **options)
    trainer.train()
    assert Path(head.name_or_path) == tmp_path / "run" / "checkpoint-2"
    trainer.save_model(str(tmp_path / "run" / "final"))
    head.add_adapter(LoraConfig(r=2))
    head.save_pretrained(tmp_path / "adapter")
    assert base_of(tmp_path / "adapter") == str(tmp_path / "run" / "final")
    DartHead.from_pretrained(str(tmp_path / "adapter"), target=target)


# The client hands httpx the bytes of an upload by an old name.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_pushed_head_is_named_by_its_repository(
    target: Any, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    head = tiny_head(target)
    head.push_to_hub("head", revision="v2")
    head.add_adapter(LoraConfig(r=2))
    head.save_pretrained(tmp_path / "adapter")
    assert base_of(tmp_path / "adapter") == "alice/head"
    loaded = DartHead.from_pretrained(str(tmp_path / "adapter"), target=target)
    torch.testing.assert_close(drafts(loaded), drafts(head))


def test_what_an_adapter_says_of_its_use_is_kept(target: Any, tmp_path: Path) -> None:
    tiny_head(target, enable_thinking=False).save_pretrained(tmp_path / "base")
    head = DartHead.from_pretrained(str(tmp_path / "base"), target=target)
    head.add_adapter(LoraConfig(r=2))
    said = {"tree": {"nodes": 4, "draft_cost": 0.7}, "enable_thinking": True, "chat_template_hash": "abc"}
    said |= {"draft_window": 40, "draft_sink": 2}
    for name, value in said.items():
        setattr(head.config, name, value)
    head.save_pretrained(tmp_path / "adapter")
    loaded = DartHead.from_pretrained(str(tmp_path / "adapter"), target=target)
    assert {name: getattr(loaded.config, name) for name in said} == said
    assert (loaded.tree_config.nodes, loaded.tree_config.draft_cost) == (4, 0.7)
    file = tmp_path / "adapter" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tree": {"nodes": "many"}}))
    refused(lambda: DartHead.from_pretrained(str(tmp_path / "adapter"), target=target), ValueError, "cannot be read")


def test_an_editor_that_would_not_be_saved_is_not_trained(tmp_path: Path) -> None:
    target = tiny_training.tiny_target()
    head = tiny_training.tiny_head(target)
    head.save_pretrained(tmp_path / "base")
    head.add_adapter(LoraConfig(r=2))
    head.add_editor()
    arguments = EditTrainingArguments(str(tmp_path / "run"), report_to="none", use_cpu=True)
    refused(lambda: EditTrainer(head, target, arguments), ValueError, "without the editor")
