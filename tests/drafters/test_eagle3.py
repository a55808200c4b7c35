"""Published EAGLE-3 heads: logits as their own code gives them, and text as stock gives it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cases import GREEDY, SAMPLED, batch
from support.checkpoints import reordered, save
from support.compare import assert_identical, tally
from support.eagle3 import JOINED, PEAGLE, VARIANTS, eagle3_config, eagle3_tensors, forward, variant
from support.heads import drafts, peagle_head
from support.letters import letters
from support.tiny import prompts, tiny_target

from hf_dart import DartHead, EagleDrafter, TreeConfig, load_drafter
from hf_dart.cli import main
from hf_dart.drafters.beams import BeamProposal
from hf_dart.interop.vllm import write_vllm
from hf_dart.models.verify import features_request, gather_features

EXACT = tally("float64, published EAGLE-3 heads")


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("llama", num_hidden_layers=8)


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    pickle = Path(folder, "pytorch_model.bin")
    return torch.load(pickle, weights_only=True) if pickle.exists() else load_file(Path(folder, "model.safetensors"))


@torch.no_grad()
@pytest.mark.parametrize("name", [*VARIANTS, *JOINED])
def test_logits_are_the_published_ones(target: Any, tmp_path: Path, name: str) -> None:
    folder = variant(tmp_path, target, name)
    drafter = load_drafter(folder, target=target)
    assert isinstance(drafter, EagleDrafter)
    drafter.beam = 3
    config = json.loads((tmp_path / "config.json").read_text())
    ids = prompts([9])["input_ids"]
    outputs = target(input_ids=ids[:, :-1], use_cache=False, **features_request(list(range(9))))
    features = gather_features(outputs, drafter.feature_layers, ids[:, :-1])
    counted = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [1, 3, 4])  # L // 2 and L - 3
    taps = config.get("eagle_aux_hidden_state_layer_ids") or [tap + 1 for tap in counted]
    theirs = gather_features(outputs, [8] if name in JOINED else taps, ids[:, :-1])[0]
    state = drafter.begin(1, 4)
    drafter.extend(state, features[:, :3], ids[:, 1:4], torch.tensor([3]))
    proposal = drafter.propose(state, features[:, 3:], ids[:, 4:], torch.tensor([features.shape[1] - 3]), 4)
    assert isinstance(proposal, BeamProposal)
    columns = slice(None) if drafter.draft_vocabulary is None else drafter.draft_vocabulary
    weights, table = weights_of(folder), target.get_input_embeddings().weight
    weights.setdefault("lm_head.weight", target.lm_head.weight)
    known = {}
    for place, token in enumerate(proposal.branches[0, 0].tolist()):
        # After the first branches; deeper ones are looked at in test_eagle.
        logits = forward(config, weights, table, theirs, ids[0, 1:], [token]).log_softmax(-1)
        known[place] = logits
        ours = proposal.conditional[0, 0, place, columns].double()
        torch.testing.assert_close(ours, logits[1], rtol=0, atol=2e-6)
    torch.testing.assert_close(proposal.logits[0, 0, columns].double(), known[0][0], rtol=0, atol=2e-6)


def test_draft_tokens_in_another_order(target: Any, tmp_path: Path) -> None:
    config = eagle3_config(target, draft_vocab_size=20)
    ascending = eagle3_tensors(config)
    files = {"ascending": ascending, "mixed": reordered(ascending, "lm_head.weight")}
    one, other = (load_drafter(save(tmp_path / name, config, files[name]), target=target) for name in files)
    assert all(torch.equal(weight, one.state_dict()[name]) for name, weight in other.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("name", PEAGLE)
def test_peagle_heads_are_dart_heads(target: Any, tmp_path: Path, name: str) -> None:
    folder = variant(tmp_path, target, name)
    head = load_drafter(folder, target=target)
    assert isinstance(head, DartHead)
    assert head.draft_length == 5
    config = json.loads((tmp_path / "config.json").read_text())
    ids = prompts([9])["input_ids"]
    outputs = target(input_ids=ids[:, :-1], use_cache=False, **features_request(list(range(9))))
    features = gather_features(outputs, head.feature_layers, ids[:, :-1])
    theirs = gather_features(outputs, config["eagle_aux_hidden_state_layer_ids"], ids[:, :-1])[0]
    state = head.begin(1, 4)
    head.extend(state, features[:, :3], ids[:, 1:4], torch.tensor([3]))
    ours = head.propose(state, features[:, 3:], ids[:, 4:], torch.tensor([features.shape[1] - 3])).logits[0]
    table = target.get_input_embeddings().weight
    expected = forward(config, weights_of(folder), table, theirs, ids[0, 1:], [], masks=4)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    head.tree_config = TreeConfig(nodes=16)
    for mode in (GREEDY, SAMPLED):
        assert_identical(target, head, batch(4, "sdpa"), into=EXACT, **mode)
    head.save_pretrained(tmp_path / "ours")
    again = load_drafter(str(tmp_path / "ours"), target=target)
    assert all(torch.equal(weight, head.state_dict()[key]) for key, weight in again.state_dict().items())


def test_as_many_levels_as_in_the_original_code(target: Any, tmp_path: Path) -> None:
    """`EaModel` takes depth=7 by default, draws a first level before them, and says so in no file."""
    for name in ("original", "EAGLE-1"):
        assert load_drafter(variant(tmp_path / name, target, name), target=target).draft_length == 8


def test_what_we_write_for_vllm_is_read_back(target: Any, tmp_path: Path) -> None:
    head = peagle_head(target, draft_vocabulary=list(range(1, 48, 2)), num_layers=2)
    write_vllm(head, tmp_path, target=target, verifier="someone/target")
    again = load_drafter(str(tmp_path), target=target)
    assert isinstance(again, DartHead)
    assert torch.equal(drafts(again), drafts(head))


QUICK = ("EAGLE-1", "original, draft vocabulary", "modelopt", "speculators, 0.9's defaults", "speculators, own table")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in (*VARIANTS, *JOINED)]
)
def test_text_is_stocks(target: Any, tmp_path: Path, name: str) -> None:
    drafter = load_drafter(variant(tmp_path, target, name), target=target)
    drafter.tree_config = TreeConfig(nodes=16)
    for mode in (GREEDY, SAMPLED):
        assert_identical(target, drafter, batch(4, "sdpa"), into=EXACT, **mode)


def test_what_was_found_is_said(target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hf_dart")
    folder = variant(tmp_path, target, "speculators")
    load_drafter(folder, target=target)
    assert f"{folder} holds an EAGLE-3 head in the format of speculators, which EagleDrafter reads." in caplog.text


@torch.no_grad()
@pytest.mark.parametrize("name", ["original, draft vocabulary", "original, a table of its own", "original, yarn",
                                  "EAGLE-2, Qwen2's", "speculators, 0.9's defaults",
                                  "speculators, three layers"])  # fmt: skip
def test_saved_in_our_format_it_is_the_same_head(target: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    first = load_drafter(variant(tmp_path, target, name), target=target)
    assert first.config.origin_license == "mit"
    first.save_pretrained(tmp_path / "ours")
    again = load_drafter(str(tmp_path / "ours"), target=target)
    before, after = first.config.to_dict(), again.config.to_dict()
    assert {**after, "_name_or_path": None} == {**before, "_name_or_path": None}
    state, features = first.state_dict(), torch.randn(1, 6, first.config.features_width, dtype=torch.float64)
    assert all(torch.equal(weight, state[key]) for key, weight in again.state_dict().items())
    tokens = prompts([6])["input_ids"]
    ours, theirs = (one.propose(one.begin(1, 4), features, tokens, torch.tensor([6])).logits for one in (again, first))
    assert torch.equal(ours, theirs)


def test_the_targets_own_table_is_not_kept(target: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = variant(tmp_path, target, "speculators, own table")
    weights = load_file(tmp_path / "model.safetensors")
    weights["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    save_file(weights, tmp_path / "model.safetensors")
    drafter = load_drafter(folder, target=target)
    assert drafter.embed_tokens is None
    assert drafter.config.embeddings == "table"
    assert "embed_tokens.weight" not in drafter.state_dict()


def test_on_the_command_line(target: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    single = tiny_target("llama", num_hidden_layers=8, dtype=torch.float32)
    single.save_pretrained(tmp_path / "target")
    letters("abcdefgh").save_pretrained(tmp_path / "target")
    head = variant(tmp_path / "head", target, "original, draft vocabulary")
    pair = ("--target", str(tmp_path / "target"))
    (tmp_path / "head" / "README.md").write_text("---\nlicense: mit\n---\n")
    short = ("--temperature", "0", "--max-new-tokens", "6", "abc")
    assert main(["generate", *pair, "--head", head, "--stats", *short]) == 0
    assert "drafts accepted" in capsys.readouterr().err
    assert main(["convert", head, str(tmp_path / "ours"), "--to", "dart", *pair]) == 0
    assert main(["generate", *pair, "--head", str(tmp_path / "ours"), *short]) == 0
    assert main(["view", *pair, "--head", head, "--output", str(tmp_path / "page.html"), *short]) == 0
    assert main(["push", str(tmp_path / "ours"), "me/eagle", "--dry-run", str(tmp_path / "pushed")]) == 0
    card = (tmp_path / "pushed" / "README.md").read_text()
    assert "license: mit" in card
    assert "| published as | `head`, in another format |" in card


def test_the_runs_accepted_drafts() -> None:
    if not EXACT.taus:
        pytest.skip("none of the runs that this test adds up was selected")
    assert EXACT.mean_tau > 1.3
