"""`load_drafter("auto")`: the best known drafter that can be loaded, or copies of earlier text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import assert_identical
from support.tiny import prompts, tiny_head, tiny_target
from transformers import AutoModelForCausalLM

from hf_dart import DartHead, LookupDrafter, load_drafter
from hf_dart.decoding import load_drafter as module
from hf_dart.hub.loading import PACKAGED, PACKAGED_HEAD, PACKAGED_TARGET

GREEDY = {"do_sample": False, "max_new_tokens": 40}


def known_are(*paths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drafters = [{"repository": str(path)} for path in paths]
    monkeypatch.setattr(module, "published_drafters", lambda config: ("known", drafters))


def test_the_first_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One that is not there, and one of another target, are passed over."""
    target = tiny_target("llama")
    tiny_head(tiny_target("llama", hidden_size=16)).save_pretrained(tmp_path / "other")
    tiny_head(target, draft_length=3).save_pretrained(tmp_path / "head")
    known_are("someone/offline", tmp_path / "other", tmp_path / "head", monkeypatch=monkeypatch)
    drafter = load_drafter("auto", target=target, default=True)
    assert isinstance(drafter, DartHead)
    assert drafter.draft_length == 3
    assert target.generate.default is drafter
    assert target.generate.memory is None
    assert not caplog.messages


@pytest.mark.parametrize("default", [False, True])
def test_copies_where_there_is_none(default: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Exact, from this text and those of earlier calls, and said in one line."""
    target = tiny_target("llama")
    drafter = load_drafter("auto", target=target, default=default)
    (message,) = caplog.messages
    assert "no published drafter of LlamaForCausalLM can be loaded" in message
    assert isinstance(drafter, LookupDrafter)
    tiny_head(target)  # which attaches the target again
    assert target.generate.default is (drafter if default else None)
    for _ in range(2):
        assert_identical(target, drafter, prompts([9]), **GREEDY)
    assert drafter.last_stats.tau > 1.3
    assert target.generate.memory.store.tokens > 40, "texts of these calls"
    called = [target.generate(**prompts([9]), **GREEDY, **drafting) for drafting in ({}, {"assistant": None})]
    assert torch.equal(*called)


def test_copies_of_earlier_calls_are_left_out_where_processes_share_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls take no memory."""
    monkeypatch.setattr(module, "is_shared", lambda target: True)
    target = tiny_target("llama")
    load_drafter("auto", target=target, default=True)
    assert target.generate.memory is None


def test_why_the_first_one_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_target("llama")
    tiny_head(target).save_pretrained(tmp_path)
    known_are(tmp_path, monkeypatch=monkeypatch)
    assert isinstance(load_drafter("auto", target=target, draft_window=3), LookupDrafter)
    assert f"can be loaded ({tmp_path} is not used: draft_window is 3; give " in caplog.messages[-1]


def test_the_packaged_one_by_the_name_that_commands_take() -> None:
    target = AutoModelForCausalLM.from_pretrained(PACKAGED_TARGET, dtype="float32")
    assert load_drafter(PACKAGED, target=target).name_or_path == str(PACKAGED_HEAD)
