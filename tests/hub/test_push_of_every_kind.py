"""Drafters that are no DART heads go to the Hub and come back: the same cards, commands and shim (`test_push.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from support import tiny_training as training
from support.hub import Hub, card_errors
from support.hub import hub as hub
from support.tiny import prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_target

from hf_dart import DiffusionDrafter, EagleDrafter, load_drafter
from hf_dart.cli import main
from hf_dart.hub.card import BEGIN, render_card
from hf_dart.hub.facts import HeadFacts
from hf_dart.hub.kinds import KINDS
from hf_dart.hub.loading import PACKAGED_HEAD
from hf_dart.hub.publish import push_folder
from hf_dart.training import DiffusionTrainer

# The client hands httpx the bytes of an upload by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
MAKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "diffusion": (tiny_diffusion_drafter, {}),
    "diffusion, own table": (tiny_diffusion_drafter, {"share_embeddings": False, "hidden_size": 24}),
    "eagle": (tiny_eagle_drafter, {}),
}


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("llama")


@pytest.fixture
def alice(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Hub:
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    return hub


def card_of(hub: Hub, repository: str) -> str:
    card = hub.repositories[repository].files()["README.md"].decode()
    assert card_errors(card.split("---\n")[1]) == []
    return card


@pytest.mark.parametrize("name", MAKERS)
def test_up_and_back_by_name(name: str, alice: Hub, target: Any) -> None:
    make, config = MAKERS[name]
    drafter = make(target, **config)
    commit = drafter.push_to_hub("mine", license="mit", base_model="them/tiny")
    stored, kind = alice.repositories["alice/mine"], KINDS[drafter.config.model_type]
    assert stored.messages[commit.oid] == f"Upload {type(drafter).__name__}"
    assert {"config.json", "model.safetensors", "custom_generate/generate.py"} <= stored.files().keys()
    card = card_of(alice, "alice/mine")
    assert f'{type(drafter).__name__}.from_pretrained("alice/mine", target=model)' in card
    assert kind.texts.introduced in card
    data = ModelCard(card).data
    assert data.tags[:2] == ["hf-dart", kind.texts.tag]
    assert data.base_model_relation == "adapter"

    inputs = prompts([7, 4])
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 12}
    texts = []
    for given in ({}, *({"assistant": one} for one in loaded_twice(drafter, target))):
        torch.manual_seed(1)
        texts.append(target.generate(**inputs, **options, **given))
        if given:
            assert given["assistant"].last_stats.accepted > 0
    torch.manual_seed(1)
    remote = {"custom_generate": "alice/mine", "trust_remote_code": True, "assistant": given["assistant"]}
    texts.append(target.generate(**inputs, **options, **remote))
    assert all(torch.equal(text, texts[0]) for text in texts)


def loaded_twice(drafter: Any, target: Any) -> list[Any]:
    """By its class, and by what its config says."""
    loaded = [type(drafter).from_pretrained("alice/mine", target=target), load_drafter("alice/mine", target=target)]
    for one in loaded:
        assert type(one) is type(drafter)
        assert all(torch.equal(one.state_dict()[name], weight) for name, weight in drafter.state_dict().items())
    return loaded


def test_what_a_card_says_of_a_diffusion_drafter(target: Any, tmp_path: Path) -> None:
    said = {
        "| drafts | 5 tokens in 3 reverse steps, left to right |": {"unmasking": "left_to_right"},
        "the last 7 tokens, and layers 0, 2 of the target's 2": {"feature_layers": [0, 2]},
        "the table of its tokens included": {"share_embeddings": False},
        "A model with other vocabulary is refused": {"share_embeddings": False},
        "| drafts | 5 tokens in one reverse step, the likeliest tokens first |": {"denoise_steps": 1},
        "| layers | one decoder layer: ": {"num_layers": 1},
    }
    plain = {"| reads | the last 7 tokens |", "embeddings and LM head are the target's", "other widths, layers or"}
    for text, config in said.items():
        tiny_diffusion_drafter(target, **config).save_pretrained(tmp_path)
        card = render_card(HeadFacts.read(tmp_path))
        assert {one for one in said if one in card} == {one for one, given in said.items() if given == config}
        assert card.count("\n# A diffusion drafter\n") == 1
        assert "eprint = {2408.05636}" in card
        assert text in card.partition(BEGIN)[2]
    tiny_diffusion_drafter(target).save_pretrained(tmp_path)
    card = render_card(HeadFacts.read(tmp_path))
    assert all(text in card for text in plain)


def test_what_a_card_says_of_an_eagle_head(target: Any, tmp_path: Path) -> None:
    for beam, text in ((1, "one pass each |"), (3, "one pass each, the 3 best of each depth drafted on from |")):
        drafter = tiny_eagle_drafter(target, beam=beam)
        drafter.save_pretrained(tmp_path)
        card = render_card(HeadFacts.read(tmp_path))
        assert f"| drafts | {drafter.draft_length} tokens, {text}" in card
        assert "# An EAGLE head\n" in card


def test_a_trainer_pushes_its_drafter_with_its_record(alice: Hub, tmp_path: Path) -> None:
    target = training.tiny_target()
    fields = {"draft_length": 4, "context_window": 24}
    drafter = DiffusionDrafter.from_target(target, **fields)
    rows = training.token_rows(training.LENGTHS)
    settings = {"max_steps": 2, "text_weight": 0.5, "revealed_share": 0.75}
    trainer = training.tiny_trainer(tmp_path / "run-8", drafter, target, rows, kind=DiffusionTrainer, **settings)
    trainer.train()
    trainer.push_to_hub(license="mit")
    files = alice.repositories["alice/run-8"].files()
    told = {"revealed_share": 0.75, "text_weight": 0.5}
    assert told.items() <= json.loads(files["training.json"]).items()
    card = card_of(alice, "alice/run-8")
    assert "| blocks | 75% with tokens revealed; 0.5 x cross-entropy of the text's next" in card
    assert DiffusionDrafter.from_pretrained("alice/run-8", target=target).config.draft_length == 4


def test_the_command(alice: Hub, target: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {"drafter": tiny_diffusion_drafter(target), "eagle": tiny_eagle_drafter(target)}
    for name, drafter in folders.items():
        drafter.save_pretrained(tmp_path / name)
        assert main(["push", str(tmp_path / name), f"alice/{name}", "--license", "mit"]) == 0
        assert "license: mit" in card_of(alice, f"alice/{name}")
    capsys.readouterr()
    target.save_pretrained(tmp_path / "target")
    assert main(["push", str(tmp_path / "target"), "alice/target"]) == 2
    shown = capsys.readouterr().err
    assert "holds no config.json of a" in shown
    for called in ("a DART head", "a DFlash drafter", "a diffusion drafter", "an EAGLE head"):
        assert called in shown
    assert "alice/target" not in alice.repositories
    with pytest.raises(ValueError, match="an EAGLE head, and no diffusion drafter: load it with EagleDrafter"):
        DiffusionDrafter.from_pretrained("alice/eagle", target=target)
    assert type(EagleDrafter.from_pretrained("alice/eagle")) is EagleDrafter


def test_a_folder_without_weights_is_not_pushed(alice: Hub, target: Any, tmp_path: Path) -> None:
    tiny_diffusion_drafter(target).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        push_folder(tmp_path, "alice/nothing")
    assert not alice.repositories


def test_a_dry_run_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (tmp_path / "file").touch()
    words = ["push", str(PACKAGED_HEAD), "alice/head", "--dry-run"]
    assert main([*words, str(project)]) == 0  # an empty folder is taken
    (project / "README.md").write_text("my own")
    for taken in (project, tmp_path / "file"):
        assert main([*words, str(taken)]) == 2
        assert "is there already; give an empty folder" in capsys.readouterr().err
    assert (project / "README.md").read_text() == "my own"
