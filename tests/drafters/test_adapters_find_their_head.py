"""Where heads lie, as their adapters name it, and what an adapter's own config says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support import tiny_training
from support.heads import drafts
from support.hub import Hub
from support.hub import hub as hub
from support.sentences import one_sentence
from support.tiny import tiny_head, tiny_target
from support.tiny_training import tiny_trainer, token_rows

from hf_dart import DartHead
from hf_dart.training.trainers.edit import EditTrainer, EditTrainingArguments

ROWS = [[24], [24]]


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("qwen3", dtype=torch.float32)


def base_of(folder: Path) -> str:
    return json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]


def changed(head: DartHead) -> DartHead:
    """As if trained on."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return head


def test_an_adapter_names_the_folder_that_holds_its_head(target: Any, tmp_path: Path) -> None:
    head = tiny_head(target)
    head.save_pretrained(tmp_path / "first")
    head = changed(DartHead.from_pretrained(str(tmp_path / "first"), target=target))
    with pytest.raises(ValueError, match="other weights than the one in") as error:
        head.add_adapter(LoraConfig(r=2))
    assert "save_pretrained" in one_sentence(error)
    head.save_pretrained(tmp_path / "second")
    shutil.move(tmp_path / "second", tmp_path / "moved")
    with pytest.raises(ValueError, match="not there any more") as error:
        head.add_adapter(LoraConfig(r=2))
    one_sentence(error)
    head.save_pretrained(tmp_path / "second", max_shard_size="10KB")
    head.add_adapter(LoraConfig(r=2))
    head.save_pretrained(tmp_path / "adapter")
    assert base_of(tmp_path / "adapter") == str(tmp_path / "second")
    assert torch.equal(drafts_of(DartHead.from_pretrained(str(tmp_path / "adapter"), target=target)), drafts_of(head))


def drafts_of(head: DartHead) -> torch.Tensor:
    return drafts(head.double())


def test_a_checkpoint_has_its_final_name(tmp_path: Path) -> None:
    target = tiny_training.tiny_target()
    head = tiny_training.tiny_head(target)
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = tiny_trainer(tmp_path / "run", head, target, token_rows(ROWS), **options)
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
    assert torch.equal(drafts_of(loaded), drafts_of(head))


def test_what_an_adapter_says_of_its_use_is_kept(target: Any, tmp_path: Path) -> None:
    tiny_head(target, enable_thinking=False).save_pretrained(tmp_path / "base")
    head = DartHead.from_pretrained(str(tmp_path / "base"), target=target)
    head.add_adapter(LoraConfig(r=2))
    said = {"tree": {"nodes": 4, "draft_cost": 0.7}, "enable_thinking": True, "chat_template_hash": "abc"}
    for name, value in said.items():
        setattr(head.config, name, value)
    head.save_pretrained(tmp_path / "adapter")
    loaded = DartHead.from_pretrained(str(tmp_path / "adapter"), target=target)
    assert {name: getattr(loaded.config, name) for name in said} == said
    assert (loaded.tree_config.nodes, loaded.tree_config.draft_cost) == (4, 0.7)
    file = tmp_path / "adapter" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tree": {"nodes": "many"}}))
    with pytest.raises(ValueError, match="cannot be read") as error:
        DartHead.from_pretrained(str(tmp_path / "adapter"), target=target)
    one_sentence(error)


def test_an_editor_that_would_not_be_saved_is_not_trained(tmp_path: Path) -> None:
    target = tiny_training.tiny_target()
    head = tiny_training.tiny_head(target)
    head.save_pretrained(tmp_path / "base")
    head.add_adapter(LoraConfig(r=2))
    head.add_editor()
    with pytest.raises(ValueError, match="without the editor") as error:
        EditTrainer(head, target, EditTrainingArguments(str(tmp_path / "run"), report_to="none", use_cpu=True))
    one_sentence(error)
