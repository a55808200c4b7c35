"""Drafters go to the Hub, through the real client and a Hub on this machine (`support/hub.py`)."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.errors import LocalEntryNotFoundError
from peft import LoraConfig
from support import tiny_training as training
from support.heads import drafts, shaken
from support.hub import Hub, card_of
from support.sentences import assert_command_says, refused
from support.tiny import prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head

from hf_dart import DartHead, load_drafter, load_once
from hf_dart.cli import main
from hf_dart.hub.card import BEGIN, END
from hf_dart.hub.kinds import kind_of
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET
from hf_dart.hub.publish import push_folder, write_repository

BENCH = Path(__file__).parents[2] / "model_cards" / "demo_pair" / "bench.json"
MAKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dart": (tiny_head, {}),
    "diffusion": (tiny_diffusion_drafter, {}),
    "eagle": (tiny_eagle_drafter, {}),
}


@pytest.mark.parametrize("name", MAKERS)
def test_up_and_back_by_name(name: str, alice: Hub, target: Any) -> None:
    make, config = MAKERS[name]
    drafter = make(target, **config)
    class_name, kind = type(drafter).__name__, kind_of(drafter.config.model_type)
    commit = drafter.push_to_hub("mine", license="mit", base_model="them/tiny", tags=["mine"])
    stored = alice.repositories["alice/mine"]
    assert not stored.private
    assert commit.oid == stored.refs["main"]
    assert stored.messages[commit.oid] == f"Upload {class_name}"
    custom = {"custom_generate/generate.py", "custom_generate/requirements.txt"}
    assert set(stored.files()) == {".gitattributes", "README.md", "config.json", "model.safetensors", *custom}
    card = card_of(alice, "alice/mine")
    # The whole id, though only the name was given.
    assert f'{class_name}.from_pretrained("alice/mine", target=model)' in card
    assert kind.texts.introduced in card
    data = ModelCard(card).data
    assert data.tags[:2] == ["hf-dart", kind.texts.tag]
    assert data.base_model_relation == "adapter"

    by_class = type(drafter).from_pretrained("alice/mine", target=target)
    by_config = load_drafter("alice/mine", target=target)
    options = {**prompts([7, 4]), "do_sample": True, "top_k": 0, "max_new_tokens": 12}
    torch.manual_seed(1)
    stock = target.generate(**options)
    by_code = {"custom_generate": "alice/mine", "trust_remote_code": True}
    own = load_once("alice/mine", target, revision=commit.oid)  # what that loads, once per model
    for loaded, how in ((by_class, {"assistant": by_class}), (by_config, {"assistant": by_config}), (own, by_code)):
        assert type(loaded) is type(drafter)
        assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in drafter.state_dict().items())
        torch.manual_seed(1)
        assert torch.equal(target.generate(**options, **how), stock)
        assert loaded.last_stats.accepted > 0


def test_nobody_pushes_what_is_not_theirs(alice: Hub, head: DartHead, monkeypatch: pytest.MonkeyPatch) -> None:
    head.push_to_hub("alice/head")
    monkeypatch.setenv("HF_TOKEN", "hf_bob")
    with pytest.raises(OSError, match=r"refused 'alice/head' with 403 .*take a token that may write there"):
        head.push_to_hub("alice/head")
    monkeypatch.delenv("HF_TOKEN")
    refused(lambda: head.push_to_hub("alice/new"), OSError, r"refused 'alice/new' with 401 .*hf auth login")
    assert len(alice.repositories["alice/head"].commits) == 2


def test_nothing_is_committed_halfway(alice: Hub, head: DartHead, monkeypatch: pytest.MonkeyPatch) -> None:
    head.push_to_hub("alice/head")
    before = alice.repositories["alice/head"].refs["main"]
    refused(lambda: head.push_to_hub("alice/new", bench="nowhere.json"), ValueError, "cannot be read")
    assert "alice/new" not in alice.repositories
    alice.failing.add("POST /api/models/alice/head/commit")
    with pytest.raises(OSError, match=r"with 500 \(.*out of order.*\); try again later"):
        head.push_to_hub("alice/head", license="mit")
    alice.failing.clear()
    with pytest.raises(ValueError, match='"license" must be a string'):
        head.push_to_hub("alice/head", license={"no": "string"})  # type: ignore[dict-item]

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise LocalEntryNotFoundError("the connection broke")

    monkeypatch.setattr(HfApi, "hf_hub_download", broken)  # of the card that is there
    refused(lambda: head.push_to_hub("alice/head", license="mit"), OSError, "cannot be reached")
    assert alice.repositories["alice/head"].refs["main"] == before


def test_what_people_wrote_into_the_card_stays(alice: Hub, head: DartHead, caplog: pytest.LogCaptureFixture) -> None:
    head.push_to_hub("alice/head", license="mit")
    stored, by_hand = alice.repositories["alice/head"], "---\nlicense: mit\n---\n\n# All mine\n"
    stored.commit("main", stored.refs["main"], {**stored.files(), "README.md": by_hand.encode()}, "by hand")
    with caplog.at_level(logging.WARNING):
        head.push_to_hub("alice/head", base_model="them/tiny")
    assert card_of(alice) == by_hand
    assert "stays as it is" in caplog.text
    caplog.clear()
    head.push_to_hub("alice/head", card=f"# New\n\n{BEGIN}\n{END}\n")
    assert "# New\n" in card_of(alice)
    assert "## Limits" in card_of(alice)
    assert "stays as it is" not in caplog.text


def test_a_card_that_changes_meanwhile_is_not_lost(alice: Hub, head: DartHead, monkeypatch: pytest.MonkeyPatch) -> None:
    head.push_to_hub("alice/head")
    stored = alice.repositories["alice/head"]

    def meanwhile(*args: Any) -> Any:
        stored.commit("main", stored.refs["main"], {**stored.files(), "README.md": b"# Mine"}, "by hand")
        write_repository(*args)

    monkeypatch.setattr("hf_dart.hub.publish.write_repository", meanwhile)
    refused(lambda: head.push_to_hub("alice/head", license="mit"), OSError, r"412 .*changed meanwhile, push again")
    assert card_of(alice) == "# Mine"


def test_files_that_describe_weights_come_and_go_with_them(alice: Hub, head: DartHead, tmp_path: Path) -> None:
    folder = shutil.copytree(PACKAGED_HEAD, tmp_path / "run")
    (folder / "training.json").write_text('{"steps": 7}')
    push_folder(folder, "alice/head", bench=BENCH)
    stored = alice.repositories["alice/head"]
    files = stored.files()
    assert json.loads(files["training.json"]) == {"steps": 7}
    assert json.loads(files["bench.json"]) == json.loads(BENCH.read_text(encoding="utf8"))
    assert files["model.safetensors"] == (PACKAGED_HEAD / "model.safetensors").read_bytes()
    # The weights go up once.
    uploads = [asked for asked in alice.requests if asked.startswith("PUT")]
    push_folder(folder, "alice/again")
    assert [asked for asked in alice.requests if asked.startswith("PUT")] == uploads
    assert len(uploads) == 1
    theirs = {"adapter_config.json": b"{}", "notes.md": b"mine", "other.safetensors": b"0"}
    stored.commit("main", stored.refs["main"], {**stored.files(), **theirs}, "by hand")
    head.push_to_hub("alice/head")
    files = stored.files()
    assert not {"adapter_config.json", "bench.json", "training.json"} & files.keys()
    assert {"notes.md", "other.safetensors", "model.safetensors"} <= files.keys()


def test_an_adapter_of_a_local_head_is_not_pushed(alice: Hub, head: DartHead, target: Any, tmp_path: Path) -> None:
    head.save_pretrained(tmp_path / "head")
    adapted = DartHead.from_pretrained(str(tmp_path / "head"), target=target)
    adapted.add_adapter(LoraConfig(r=2))
    shaken(adapted).save_pretrained(tmp_path / "adapter")
    refused(lambda: push_folder(tmp_path / "adapter", "alice/adapter"), ValueError, "push that head too")
    assert "alice/adapter" not in alice.repositories
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "alice/head"}))
    push_folder(tmp_path / "adapter", "alice/adapter")
    head.push_to_hub("alice/head")
    loaded = DartHead.from_pretrained("alice/adapter", target=target)
    assert torch.equal(drafts(loaded), drafts(adapted))


def test_a_trainer_pushes_its_head_with_a_card(alice: Hub, tmp_path: Path) -> None:
    trainer = training.trainer_on(tmp_path / "run-7", training.token_rows(training.LENGTHS), max_steps=2)
    trainer.train()
    (tmp_path / "run-7" / "optimizer.pt").write_bytes(b"0" * 100)
    commit = trainer.push_to_hub(license="mit")
    assert alice.repositories["alice/run-7"].messages[commit.oid] == "End of training"
    card = card_of(alice, "alice/run-7")
    assert all(said in card for said in ("# run-7\n", "| steps | 2 |", "license: mit"))
    assert not {"training_args.bin", "optimizer.pt"} & alice.repositories["alice/run-7"].files().keys()


def test_a_dry_run_writes_what_would_be_pushed(
    alice: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["push", str(PACKAGED_HEAD), "alice/head", "--license", "mit", "--bench", str(BENCH)]
    (tmp_path / "dry").mkdir()  # an empty folder is taken
    assert main([*words, "--dry-run", str(tmp_path / "dry")]) == 0
    assert "with --base-model" in caplog.text
    assert "nothing was pushed" in capsys.readouterr().out
    assert not alice.requests
    assert main([*words, "--private"]) == 0
    assert capsys.readouterr().out.startswith(f"{alice.url}/alice/head/commit/")
    assert alice.repositories["alice/head"].private
    pushed = alice.repositories["alice/head"].files()
    dry = tmp_path / "dry"
    written = {str(file.relative_to(dry)): file.read_bytes() for file in dry.rglob("*") if file.is_file()}
    assert written == {name: content for name, content in pushed.items() if name != ".gitattributes"}
    for taken in (dry, dry / "README.md"):
        assert_command_says([*words, "--dry-run", str(taken)], "is there already; give an empty folder", capsys)
    assert (dry / "README.md").read_bytes() == written["README.md"]


def test_mistakes_get_one_sentence(alice: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "config.json").write_text("{}")
    for words, says in (
        ([str(tmp_path), "alice/head"], "the head that was trained there?"),
        ([str(PACKAGED_TARGET), "alice/head"], "holds no config.json of a DART head or a DFlash drafter"),
        ([str(PACKAGED_HEAD), "alice/head", "--bench", "./none.json"], "none.json cannot be read"),
        ([str(PACKAGED_HEAD), "bob/head"], "403"),
        ([str(PACKAGED_HEAD), "not an id"], "give one such as user/name"),
        ([str(PACKAGED_HEAD), "a/b/c", "--dry-run", "./none"], "give one such as user/name"),
    ):
        assert_command_says(["push", *words], says, capsys)
    assert not alice.repositories


def test_a_hub_that_is_not_there(hub: Hub, head: DartHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OSError, match=r"cannot be reached at http://127.0.0.1:9 .*; try again"):
        head.push_to_hub("alice/head", token="hf_alice")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused(lambda: head.push_to_hub("alice/head", token="hf_alice"), OSError, "HF_HUB_OFFLINE is set; unset it")
