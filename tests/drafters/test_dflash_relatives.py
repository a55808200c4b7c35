"""JetSpec, DFlash2, DSpark, and DFlash as speculators saves it: drafted as they are published, and exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import GREEDY, SAMPLED, batch
from support.checkpoints import reordered
from support.compare import assert_identical, tally
from support.guests import published
from support.heads import assert_saved, draft_after, features_of
from support.relatives import VARIANTS, pair_score, relative, relative_config, relative_tensors
from support.sentences import refused
from support.tiny import prompts, tiny_target

from hf_dart import DFlashDrafter, TreeConfig, load_drafter

EXACT = tally("float64, relatives of DFlash", least=1.3)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("qwen3", num_hidden_layers=8)


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_the_published_ones(target: Any, tmp_path: Path, name: str) -> None:
    drafter = load_drafter(relative(tmp_path, target, name), target=target)
    assert isinstance(drafter, DFlashDrafter)
    config = relative_config(target, name)
    weights = relative_tensors(config, name)
    kind = VARIANTS[name][1]
    if name == "DFlash, no taps named":
        assert drafter.feature_layers == [2, 6]
    ids = prompts([10])["input_ids"]
    features, proposal = features_of(target, drafter.feature_layers, ids), draft_after(target, drafter, ids)
    block = torch.cat([ids[0, -1:], torch.full((config["block_size"] - 1,), 47)])
    if config.get("sliding_window_non_causal"):
        config["is_causal"] = False
    hidden = published(config, weights, features[0], target.get_input_embeddings()(block))
    hidden = hidden if kind == "dspark" else hidden[1:]
    head = weights.get("lm_head.weight", target.lm_head.weight)
    assert len(hidden) == drafter.draft_length
    torch.testing.assert_close(proposal.logits[0], hidden @ head.T, rtol=1e-9, atol=1e-7)
    candidates = torch.stack([ids[0, :4]] * len(hidden))[None]
    if drafter.draft_vocabulary is not None:
        candidates = drafter.draft_vocabulary[candidates.clamp(max=19)]
    scores = torch.zeros(candidates.shape, dtype=torch.float64)
    table = drafter.transitions(proposal, ids[:, -1], candidates, scores)
    if kind == "dflash":
        assert table is None
        return
    assert table is not None
    root = int(ids[0, -1])
    for depth in range(len(hidden)):
        for place, previous in enumerate(candidates[0, depth - 1].tolist() if depth else [root] * 4):
            added = torch.stack([
                pair_score(weights, hidden[depth], previous, column)
                for column in (candidates[0, depth].tolist() if drafter.draft_vocabulary is None
                               else torch.searchsorted(drafter.draft_vocabulary, candidates[0, depth]).tolist())
            ])  # fmt: skip
            expected = added.log_softmax(-1) + torch.tensor(4.0).log()
            torch.testing.assert_close(table[0, depth, place].double(), expected, rtol=1e-5, atol=1e-5)


PER_TOKEN = {
    "speculators' DFlash2, some tokens": "candidate_selector.successor_codebook",
    "speculators' DSpark": "markov_head.markov_w2.weight",
}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_draft_tokens_in_another_order(target: Any, tmp_path: Path, name: str) -> None:
    files = {"ascending": dict, "mixed": lambda tensors: reordered(tensors, "lm_head.weight", PER_TOKEN[name])}
    one, other = (
        load_drafter(relative(tmp_path / order, target, name, change=change), target=target)
        for order, change in files.items()
    )
    assert all(torch.equal(weight, one.state_dict()[key]) for key, weight in other.state_dict().items())


@pytest.mark.parametrize("name", ["JetSpec", "DFlash2", "DSpark, gated", "speculators' DSpark"])
def test_text_is_stocks(target: Any, tmp_path: Path, name: str) -> None:
    drafter = load_drafter(relative(tmp_path, target, name), target=target)
    drafter.tree_config = TreeConfig(nodes=16)
    for mode in (GREEDY, SAMPLED):
        assert_identical(target, drafter, batch(4, "sdpa"), into=EXACT, **mode)


@pytest.mark.parametrize("name", ["DFlash2", "speculators' DSpark"])
def test_saved_in_our_format(target: Any, tmp_path: Path, name: str) -> None:
    first = load_drafter(relative(tmp_path / "theirs", target, name), target=target)
    assert_saved(first, target, tmp_path / "ours")
    content = json.loads((tmp_path / "ours" / "config.json").read_text())
    (tmp_path / "ours" / "config.json").write_text(json.dumps({**content, "published": {"model_type": "dart_dflash"}}))
    refused(lambda: load_drafter(str(tmp_path / "ours"), target=target), ValueError, "architectures")


def test_what_is_refused_by_its_name(target: Any, tmp_path: Path) -> None:
    """Speculators names a last layer before its norm; in z-lab's format drafters read it after the norm."""
    xpress, speculators = {"xpress_rank": 4}, "speculators' DFlash"
    for name, changes, words in (
        (speculators, {"aux_hidden_state_layer_ids": [2, 4, 8]}, "reads the last of 8 layers of its target before the"),
        (speculators, {**xpress, "speculators_model_type": "xpress", "architectures": ["XPress"]}, "an XPress"),
        ("JetSpec", {**xpress, "architectures": ["Qwen3XPressModel"]}, "This is an XPress drafter"),
    ):
        path = relative(tmp_path / words, target, name)
        config = json.loads(Path(path, "config.json").read_text())
        Path(path, "config.json").write_text(json.dumps({**config, **changes}))
        refused(lambda path=path: load_drafter(path, target=target), ValueError, words)
