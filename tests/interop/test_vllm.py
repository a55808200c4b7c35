"""Heads for vLLM, and `hf-dart convert`.

`examples/experiments/surveys/originals.py`, in an environment with vLLM's `speculators` package, compares the same
files with what that package computes (`docs/serving.md`); here they are held against a plain forward of that format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from support.eagle3 import forward
from support.guests import dflash_checkpoint
from support.heads import draft_after, features_of, peagle_head, shaken
from support.ngrams import by_hand, trie_file, unpacked
from support.sentences import not_read
from support.tiny import prompts, tiny_target
from support.users import letters
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_dart import DartHead, NgramTable
from hf_dart.cli import main
from hf_dart.interop.vllm import write_vllm


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("llama", num_hidden_layers=8)


def served(folder: Path, embeddings: Tensor, features: Tensor, tokens: Tensor) -> Tensor:
    """P-EAGLE as vLLM and speculators define it on the files in `folder`: logits [K, M] after a whole text."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    count = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    assert not any(config[flag] for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"))
    return forward(config, weights, embeddings.double(), features.double(), tokens, [], masks=count - 1)


def drafted(target: Any, head: DartHead, length: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [K, M] after a text, and what they were read from: features [T, F] and next tokens [T]."""
    tokens = prompts([length + 1], vocabulary=40)["input_ids"]
    features = features_of(target, head.feature_layers, tokens)
    return draft_after(target, head, tokens).logits[0], features[0], tokens[0, 1:]


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "tokens"), [({}, None), ({"num_layers": 3}, list(range(1, 48, 2))), ({"draft_length": 1}, None)]
)
def test_logits_are_those_that_are_served(
    target: Any, tmp_path: Path, config: dict[str, Any], tokens: list[int] | None
) -> None:
    head = peagle_head(target, **config, draft_vocabulary=tokens)
    write_vllm(head, tmp_path, target=target, verifier="someone/target")
    ours, features, after = drafted(target, head)
    theirs = served(tmp_path, target.get_input_embeddings().weight, features, after)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    again = drafted(target, DartHead.from_pretrained(str(tmp_path), target=target))[0]
    torch.testing.assert_close(again, ours, rtol=1e-9, atol=1e-9)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["speculators_config"]["verifier"]["name_or_path"] == "someone/target"
    assert content["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    weights = load_file(tmp_path / "model.safetensors")
    assert ("d2t" in weights) == (tokens is not None)
    if tokens is not None:
        assert (torch.arange(len(tokens)) + weights["d2t"]).tolist() == tokens
        assert weights["t2d"].nonzero()[:, 0].tolist() == tokens


REFUSED: dict[str, dict[str, Any]] = {
    "mask_mode='peagle'": {"mask_mode": "learned", "mask_token_id": None},
    "selector": {"selector_rank": 4},
    "double": {"own_lm_head": True, "double_norm": True},
    "feature_layers [2, 4]": {"feature_layers": [2, 4]},
    "feature_layers [0, 4, 5]": {"feature_layers": [0, 4, 5]},
    "feature_layers [2, 4, 8]": {"feature_layers": [2, 4, 8]},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_vllm_does_not_serve(target: Any, tmp_path: Path, words: str) -> None:
    head = peagle_head(target, **REFUSED[words])
    not_read(lambda: write_vllm(head, tmp_path / "out", target=target, verifier="x"), words)
    assert not (tmp_path / "out").exists()


# ---- the command -------------------------------------------------------------------------------------------


def converted(*words: object) -> int:
    return main(["convert", *map(str, words)])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer, and heads for it."""
    folder = tmp_path_factory.mktemp("saved")
    model = tiny_target("llama", dtype=torch.float32, num_hidden_layers=8)
    model.save_pretrained(folder / "target")
    letters("abcdefgh").save_pretrained(folder / "target")
    DartHead.from_target(model, initializer_range=0.3).save_pretrained(folder / "head")
    peagle = peagle_head(model)
    peagle.save_pretrained(folder / "peagle")
    peagle.add_adapter(LoraConfig(r=2), "a")
    shaken(peagle).save_pretrained(folder / "adapter")
    return folder


def test_what_is_not_converted(target: Any, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dflash, own = dflash_checkpoint(tmp_path / "dflash", target), ("--target", saved / "target", "--to")
    for source, place, form, words in (
        (saved / "head", saved / "peagle", "dart", "is there already"),
        (saved / "head", tmp_path / "no", "vllm", "mask_mode='peagle'"),
        (dflash, tmp_path / "no", "vllm", "DFlashDrafter"),
    ):
        assert converted(source, place, *own, form) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert converted(dflash, tmp_path / "new" / "out", *own, "dart") == 0
    assert converted(saved / "peagle", tmp_path / "also" / "new", *own, "vllm") == 0


def test_a_head_keeps_its_dtype(tmp_path: Path) -> None:
    """Whatever that of its target is."""
    target = tiny_target("llama", dtype=torch.bfloat16, num_hidden_layers=8)
    target.save_pretrained(tmp_path / "target")
    letters("abcdefgh").save_pretrained(tmp_path / "target")
    head = DartHead.from_target(target, own_lm_head=True, double_norm=True).half()
    head.save_pretrained(tmp_path / "head")
    options = ("--target", tmp_path / "target")
    assert converted(tmp_path / "head", tmp_path / "ours", "--to", "dart", *options) == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("head", "ours"))
    assert before.keys() == after.keys()
    assert all(after[name].dtype == torch.float16 and torch.equal(before[name], after[name]) for name in before)
    assert converted(tmp_path / "head", tmp_path / "half", "--to", "dart", "--dtype", "bfloat16", *options) == 0
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(half[name], before[name].bfloat16()) for name in before)


@torch.no_grad()
def test_to_vllm_adapters_are_merged(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved / "target")
    options = ("--to", "vllm", "--target", saved / "target", "--verifier", "me/target")
    assert converted(saved / "adapter", tmp_path / "merged", *options) == 0
    said = capsys.readouterr().out
    assert "vllm serve me/target --speculative-config" in said
    assert json.loads(said.split("'")[1])["num_speculative_tokens"] == 5
    adapted = DartHead.from_pretrained(str(saved / "adapter"), target=model)
    with pytest.raises(ValueError, match="merge_adapter"):
        write_vllm(adapted, tmp_path / "no", target=model, verifier="x")
    ours, features, after = drafted(model, adapted)
    theirs = served(tmp_path / "merged", model.get_input_embeddings().weight, features, after)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-4)
    plain = DartHead.from_pretrained(str(saved / "peagle"), target=model)
    assert not torch.allclose(drafted(model, plain)[0], ours, atol=1e-2)


def test_tries(tmp_path: Path) -> None:
    (tmp_path / "a.trie").write_bytes(trie_file(3, by_hand([[5, 6, 7, 5, 6, 8], [5, 6]], 3)))
    assert converted(tmp_path / "a.trie", tmp_path / "a.ngram", "--to", "ngram") == 0
    table = NgramTable.load(tmp_path / "a.ngram")
    assert unpacked(table)[5, 6] == 3
    assert table.spec.tokenizer_hash is not None
