"""Heads come back from the Hub, or not, and what is said then (`support/hub.py`, through the real client)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants
from support.hub import Hub
from support.tiny import tiny_head

from hf_dart import DartHead, DiffusionDrafter
from hf_dart.drafters import trained


def test_the_cache_serves_offline(alice: Hub, head: DartHead, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head.push_to_hub("alice/head")
    DartHead.from_pretrained("alice/head", target=target)
    alice.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    DartHead.from_pretrained("alice/head", target=target)
    DartHead.from_pretrained("alice/head", target=target, local_files_only=True)
    assert not alice.requests
    with pytest.raises(OSError, match=r"cannot be reached and .* is not on this machine as a whole"):
        DartHead.from_pretrained("alice/other", target=target)
    with pytest.raises(OSError, match="an id of the Hub names its user; give USER/head"):
        DartHead.from_pretrained("head", target=target)


def test_branches_subfolders_and_pull_requests(alice: Hub, head: DartHead, target: Any, tmp_path: Path) -> None:
    first = head.push_to_hub("alice/head").oid
    other = tiny_head(target, draft_length=3)
    other.push_to_hub("alice/head", revision="short")
    other.push_to_hub("alice/head", revision="short")  # nothing new: no commit, no error
    proposed = other.push_to_hub("alice/head", create_pr=True)
    assert proposed.pr_url == f"{alice.url}/alice/head/discussions/1"
    assert alice.repositories["alice/head"].refs["main"] == first
    lengths = {None: 5, "short": 3, "refs/pr/1": 3, first: 5}
    for revision, length in lengths.items():
        options = {} if revision is None else {"revision": revision}
        assert DartHead.from_pretrained("alice/head", target=target, **options).draft_length == length

    other.save_pretrained(tmp_path)
    HfApi().upload_folder(repo_id="alice/head", folder_path=tmp_path, path_in_repo="heads/short")
    assert DartHead.from_pretrained("alice/head", target=target, subfolder="heads/short").draft_length == 3


def test_config_and_weights_are_of_one_commit(
    alice: Hub, head: DartHead, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.push_to_hub("alice/head")
    tiny_head(target, num_layers=2).push_to_hub("alice/deeper")
    stored, deeper = alice.repositories["alice/head"], alice.repositories["alice/deeper"].files()
    plain = trained.weight_files

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        stored.commit("main", stored.refs["main"], deeper, "meanwhile")
        return plain(*args, **kwargs)

    monkeypatch.setattr(trained, "weight_files", meanwhile)
    assert DartHead.from_pretrained("alice/head", target=target).config.num_layers == 1
    assert len(stored.commits) == 3
    assert DartHead.from_pretrained("alice/head", target=target).config.num_layers == 2


def test_what_a_private_repository_says(
    alice: Hub, head: DartHead, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.push_to_hub("alice/head", private=True)
    assert alice.repositories["alice/head"].private
    DartHead.from_pretrained("alice/head", target=target)
    monkeypatch.delenv("HF_TOKEN")
    for repository in ("alice/head", "alice/nothing"):
        with pytest.raises(OSError, match=rf"no repository '{repository}' without a token; .*hf auth login"):
            DartHead.from_pretrained(repository, target=target, force_download=True)
    with pytest.raises(OSError, match="shows this token no repository 'alice/head'; check the name"):
        DartHead.from_pretrained("alice/head", target=target, token="hf_bob", force_download=True)
    with pytest.raises(OSError, match=r"refused .* with 401 \(Invalid credentials.*pass a valid token="):
        DartHead.from_pretrained("alice/head", target=target, token="hf_nobody", force_download=True)
    DartHead.from_pretrained("alice/head", target=target, token="hf_alice", force_download=True)


def test_what_else_is_not_there(alice: Hub, head: DartHead, target: Any) -> None:
    head.push_to_hub("alice/head")
    with pytest.raises(OSError, match="'alice/head' has no revision 'v2'"):
        DartHead.from_pretrained("alice/head", target=target, revision="v2")
    with pytest.raises(ValueError, match="a DART head, and no diffusion drafter: load it with DartHead"):
        DiffusionDrafter.from_pretrained("alice/head", target=target)
    api, stored = HfApi(), alice.repositories["alice/head"]

    api.delete_file("model.safetensors", "alice/head")
    with pytest.raises(OSError, match=r"alice/head holds no weights \(model.safetensors\); save, push or fetch"):
        DartHead.from_pretrained("alice/head", target=target)
    assert not any("discussions" in asked or "commits" in asked for asked in alice.requests)

    api.delete_file("config.json", "alice/head")
    with pytest.raises(ValueError, match=r"alice/head holds no config.json of DART heads"):
        DartHead.from_pretrained("alice/head", target=target)
    stored.gated = True
    with pytest.raises(OSError, match="'alice/head' is gated; ask for access"):
        DartHead.from_pretrained("alice/head", target=target)
