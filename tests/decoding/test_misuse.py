"""Mistakes of those who call: one sentence that names the remedy, and nothing is lost by them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.compare import assert_identical
from support.tiny import VOCABULARY, prompts, tiny_head, tiny_target

import hf_dart
from hf_dart import DartHead, LanguageModelDrafter, LookupDrafter, TreeConfig, attach, detach, load_drafter

GREEDY = {**prompts([7]), "do_sample": False, "max_new_tokens": 8}

Call = Callable[[Any, Any, Any], Any]  # with a target, its head, and the folder of a run that trained it


def called(**options: Any) -> Call:
    """A call of `generate` that is not drafted."""
    return lambda model, head, run: model.generate(**GREEDY, **options)


def drafted(**options: Any) -> Call:
    return lambda model, head, run: model.generate(**GREEDY, assistant=head, **options)


def loaded(name: str = "/final", load: Callable[..., Any] = load_drafter, **options: Any) -> Call:
    """A drafter that is loaded from the folder; its target is the model unless `options` say otherwise."""
    return lambda model, head, run: load(f"{run}{name}", **{"target": model, **options})


MISTAKES: dict[str, tuple[Call, str]] = {
    "a tree as a dict": (
        drafted(tree_config={"nodes": 8}),
        r"tree_config= takes a TreeConfig, not \{'nodes': 8\}; give TreeConfig\(nodes=8\)",
    ),
    "a drafter's tree as a dict": (
        lambda model, head, run: model.generate(**GREEDY, assistant=LookupDrafter(cast(Any, {"nodes": 8}))),
        "tree_config= takes a TreeConfig, not",
    ),
    "a tree without a drafter": (
        called(tree_config=TreeConfig(nodes=8)),
        "tree_config= shapes drafts, and this call has no drafter; give assistant=drafter",
    ),
    "a trace without a drafter": (
        called(refine=0, trace=True),
        "trace= shapes drafts, and this call has no drafter",
    ),
    "a path as the drafter": (
        lambda model, head, run: model.generate(**GREEDY, assistant=run),
        r"assistant= takes a loaded drafter, not str; give load_drafter\(path, target=model\), or",
    ),
    "a class as the drafter": (called(assistant=DartHead), "takes a loaded drafter"),
    "a wrapped target": (
        lambda model, head, run: attach(torch.nn.DataParallel(model), head),
        "DataParallel is no model of transformers; give the one inside it",
    ),
    "a small model as the drafter": (called(assistant=tiny_target("qwen3")), "not Qwen3ForCausalLM; .* small language"),
    "a path as the default drafter": (lambda model, _, run: attach(model, cast(Any, Path(run))), "give load_drafter"),
    "the target as its own draft model": (
        lambda model, head, run: LanguageModelDrafter(model, model),
        "target cannot be its own draft, .*; give a smaller model",
    ),
    "a name as the draft model": (
        lambda model, head, run: LanguageModelDrafter("small", model),
        "'small' is no model of transformers; load one with AutoModelForCausalLM",
    ),
    "auto, for no target": (lambda *_: load_drafter("auto"), r"^load_drafter\('auto'\) needs the target"),
    "no target": (lambda model, head, run: attach(None, head), "None is no model of transformers; load one"),
    "no target to detach": (lambda *_: detach(None), "None is no model of transformers"),
    "swapped": (
        lambda model, head, run: attach(head, model),
        "DartHead is a drafter and no target; give the target first, then the drafter",
    ),
    "compiled, swapped": (lambda model, head, run: hf_dart.compile(head, model), "give the target first"),
    "a name as the target": (
        loaded(target="target"),
        "'target' is no model of transformers; load one with AutoModelForCausalLM",
    ),
    "a name as the target of a class": (loaded(load=DartHead.from_pretrained, target="target"), "'target' is no model"),
    "a name as the target of a new head": (lambda *_: DartHead.from_target("target"), "'target' is no model"),
    "a name as the tokenizer": (
        lambda model, head, run: DartHead.from_target(model, tokenizer="target"),
        r"give AutoTokenizer.from_pretrained\('target'\)",
    ),
    "an option of loading by its former name": (loaded(torch_dtype="auto"), "no option 'torch_dtype'; .* 'dtype'"),
    "no option of loading": (loaded(defualt=True), "no option 'defualt'; leave it out"),
    "no field of a head": (
        lambda model, head, run: DartHead.from_target(model, draft_lenght=5),
        "DartConfig has no field 'draft_lenght'; did you mean 'draft_length'?",
    ),
    "many layers": (
        lambda model, head, run: DartHead.from_target(model, feature_layers=list(range(100_000))),
        r"feature_layers has 3, and the target's hidden_states go from 0 \(the embeddings\) to 2",
    ),
    "a run in place of its head": (
        loaded(""),
        r"holds no config.json; did you mean '.*final', the head that was trained there?",
    ),
    "a repository without a user": (
        lambda model, head, run: load_drafter("dart-head", target=model),
        "no folder 'dart-head', and an id of the Hub names its user; give USER/dart-head",
    ),
    "an adapter as a dict": (
        lambda model, head, run: head.add_adapter({"r": 4}),
        r"takes a config of PEFT, not \{'r': 4\}; give peft.LoraConfig\(r=16\)",
    ),
}


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("llama")


@pytest.mark.parametrize("name", MISTAKES)
def test_one_sentence_and_nothing_is_lost(target: Any, tmp_path: Path, name: str) -> None:
    head = tiny_head(target)
    head.save_pretrained(tmp_path / "final")
    call, words = MISTAKES[name]
    state = torch.get_rng_state()
    with pytest.raises((TypeError, ValueError, OSError), match=words) as error:
        call(target, head, str(tmp_path))
    said = str(error.value)
    assert "\n" not in said
    assert said.endswith((".", "?"))
    assert len(said) < 300
    assert torch.equal(torch.get_rng_state(), state)
    detach(target)  # a default drafter
    attach(target)
    assert not head.adapted
    assert_identical(target, head, prompts([7]), do_sample=False, max_new_tokens=16)


def test_a_target_is_no_draft_of_itself_wherever_it_lies(target: Any, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "target")
    other = type(target).from_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match="cannot be its own draft"):
        load_drafter(str(tmp_path / "target"), target=other)
    shutil.copytree(tmp_path / "target", tmp_path / "another")
    assert load_drafter(str(tmp_path / "another"), target=other).model.config.vocab_size == VOCABULARY
