"""Scores with an n-gram table: the same on host and device, as the paper says, and without a trace in the output."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_identical, run
from support.ngrams import back_off, random_table, unpacked
from support.tiny import VOCABULARY, prompts, tiny_head, tiny_target
from support.trees import paths, plainly
from support.users import letters
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from hf_dart import DartHead, NgramTable, TreeConfig
from hf_dart.cli import main
from hf_dart.decoding import grow
from hf_dart.decoding.grow import TreeGrower
from hf_dart.drafters.base import Proposal
from hf_dart.hub.loading import PACKAGED_HEAD
from hf_dart.trees.ngram.build import build


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> NgramTable:
    return random_table(tmp_path_factory.mktemp("table") / "table")


@pytest.mark.parametrize("order", [2, 3, 4])
def test_many_at_once_give_the_probabilities_of_the_rule(tmp_path: Path, order: int) -> None:
    """Some contexts and candidates are no tokens of the table."""
    table = random_table(tmp_path / "table", order)
    pruned = build([[1, 2, 3]], tmp_path / "pruned", order=order, vocab_size=VOCABULARY, min_counts=(9,))
    for one in (table, pruned):
        counts = unpacked(one)
        for width in range(order + 2):
            generator = np.random.default_rng(width)
            contexts, candidates = (generator.integers(-1, VOCABULARY + 2, (200, size)) for size in (width, 7))
            rows = list(zip(contexts.tolist(), candidates.tolist(), strict=True))
            wanted = [[back_off(counts, context, token, order) for token in row] for context, row in rows]
            assert one.probabilities(contexts, candidates).tolist() == wanted
            wanted = [[back_off(counts, context, token, order) for token in rows[0][1]] for context, _ in rows]
            assert one.probabilities(contexts, candidates[0]).tolist() == wanted


TEXTS = [[30, 5, 17, 9, 24, 38, 6, 12, 21, 30, 5, 17, 9], [7], [5, 6, 5, 6, 5, 6, 5]]


def trees(head: Any, config: TreeConfig, noisy: bool, deepest: list[int], *processors: Any) -> list[set[Any]]:
    """Paths that grow from a random proposal for three rows of text."""
    generator = torch.Generator().manual_seed(3)
    depth = config.depth or 4
    proposal = Proposal(
        2 * torch.randn(3, 4, VOCABULARY, dtype=torch.float64, generator=generator),
        torch.randn(3, 4, head.config.hidden_size, dtype=torch.float64, generator=generator),
    )
    proposal = Proposal(proposal.logits[:, :depth], proposal.hidden[:, :depth])
    gumbel = -torch.empty(3, 4, VOCABULARY).exponential_(1, generator=generator).log() if noisy else None
    grower = TreeGrower(head, config, LogitsProcessorList(processors), TEXTS, torch.device("cpu"))
    tree = grower(proposal, gumbel, deepest)
    return [paths(tree, row) for row in range(3)]


def head_with(table: NgramTable | None, rank: int = 0) -> DartHead:
    head = tiny_head(tiny_target("qwen3"), selector_rank=rank)
    head.ngram = table
    generator = torch.Generator().manual_seed(5)
    if rank:
        with torch.no_grad():
            for weight in head.selector.parameters():
                weight.add_(torch.randn(weight.shape, dtype=weight.dtype, generator=generator))
    return head


@pytest.mark.parametrize("scores", ["survival", "paper"])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("order", [0, 2, 4])
def test_trees_are_those_of_a_plain_search(
    tmp_path: Path, order: int, rank: int, noisy: bool, scores: str, noted: Any
) -> None:
    """N-grams or a penalty, a selector, copies and noise; one row's text is shorter than a context."""
    table = random_table(tmp_path / "table", order) if order else None
    head, kept = head_with(table, rank), noted(grow, "grow_on_host", lambda candidates, **_: candidates)
    penalty = [] if order else [RepetitionPenaltyLogitsProcessor(1.3)]
    # Paths that no node of a tree lies after are left out; without a table, no others are.
    for nodes, beam in (*([(25, 3), (6, 4)] if order else [(6, 1000)]), (25, 1000)):
        config = TreeConfig(nodes=nodes, depth=4, top_k=5, beam=beam, lookup=7, scores=scores)
        found = trees(head, config, noisy, [9, 3, 9], *penalty)
        assert found == [set(plainly(kept[-1], row, nodes, beam)) for row in range(3)]
        assert max(map(len, found[1])) <= 3
    if order:
        assert trees(head, replace(config, ngram_weight=0), noisy, [9, 3, 9]) != found, "the table counts"


def test_scores_are_those_of_the_formula(table: NgramTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best N of all paths, each scored on its own, word for word; the paper's in test_growers.py."""
    head = head_with(table)
    nodes, depth, width, weight = 20, 3, 4, 0.7
    config = TreeConfig(nodes=nodes, depth=depth, top_k=width, beam=1000, lookup=0, ngram_weight=weight)
    drafts: list[Any] = []
    monkeypatch.setattr(head, "transitions", lambda proposal, roots, *given: drafts.extend(given))
    found = trees(head, config, False, [9, 9, 9])
    candidates, alone = (part.tolist() for part in drafts)
    for row, history in enumerate(TEXTS):
        ranked = []
        growing: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        for i in range(depth):
            tokens, logs = candidates[row][i], alone[row][i]
            mass = sum(map(exp, logs))
            grown = []
            for path, above in growing:
                context = np.array([[*history, *path][-2:]])
                shares = table.probabilities(context, np.array([tokens]))[0].tolist()
                raw = [exp(s) * (q + 1e-4) ** weight for s, q in zip(logs, shares, strict=True)]
                steps = [log(r / sum(raw) * mass) for r in raw]
                grown += [
                    ((*path, token), above + max(-30, min(step, -1e-4)))
                    for token, step in zip(tokens, steps, strict=True)
                ]
            ranked += grown
            growing = grown
        ranked.sort(key=lambda entry: -entry[1])
        assert found[row] == {path for path, _ in ranked[: nodes - 1]}


def test_what_is_no_candidate_stays_none(table: NgramTable) -> None:
    """All but one candidate cut off by a nucleus: nothing grows from the others."""
    head = head_with(table)
    for config in (TreeConfig.paper(), TreeConfig(nodes=30, top_k=4, lookup=0)):
        grower = TreeGrower(head, config, LogitsProcessorList(), [[1, 2, 3]], torch.device("cpu"))
        logits = torch.full((1, 4, VOCABULARY), -inf)
        logits[:, :, 7] = 0
        tree = grower(Proposal(logits, torch.zeros(1, 4, 1)), None, [9])
        assert paths(tree, 0) == {(7,), (7, 7), (7, 7, 7), (7, 7, 7, 7)}


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.matrix), 3])
def test_a_table_changes_no_token(tmp_path: Path, size: int, options: dict[str, Any]) -> None:
    """And one that was counted from the greedy text gets more of it accepted."""
    target = tiny_target("llama")
    head = tiny_head(target)
    inputs = prompts([9, 3, 7, 12][:size])
    options = {**options, "max_new_tokens": 24}
    written = run(target, inputs, 0, **options).sequences
    head.ngram = build(written.tolist(), tmp_path / "table", order=4, vocab_size=VOCABULARY)
    taus = []
    for tree in (
        TreeConfig(nodes=12, lookup=0, ngram_weight=0),
        TreeConfig(nodes=12, lookup=0, ngram_weight=2.0, top_k=VOCABULARY),
        TreeConfig.paper(),
        TreeConfig(lookup=8, node_cost=1e-4),
    ):
        assert_identical(target, head, inputs, **options, tree_config=tree)
        taus.append(head.last_stats.tau)
    if not options["do_sample"]:
        assert taus[1] > taus[0] + 0.3
        assert taus[2] > taus[0]


def test_tables_of_other_tokenizers_are_refused(tmp_path: Path, table: NgramTable) -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    large = random_table(tmp_path / "large", vocabulary=200)
    with pytest.raises(ValueError, match="another tokenizer"):
        head.ngram = large
    assert head.ngram is None
    head.ngram = table
    head.save_pretrained(tmp_path / "head")
    again = DartHead.from_pretrained(str(tmp_path / "head"), target=target, ngram=table.path)
    assert again.ngram.path == table.path
    with pytest.raises(ValueError, match="another tokenizer"):
        DartHead.from_pretrained(str(tmp_path / "head"), target=target, ngram=large)
    hashed = build([[1, 2]], tmp_path / "hashed", vocab_size=6144)
    object.__setattr__(hashed, "spec", type(hashed.spec)(3, 6144, "0123456789abcdef"))
    with pytest.raises(ValueError, match="another tokenizer"):
        DartHead.from_pretrained(str(PACKAGED_HEAD), ngram=hashed)
    head.ngram = None
    assert head.ngram is None
    more = letters("".join(chr(256 + number) for number in range(VOCABULARY)))
    more.add_special_tokens({"pad_token": "<pad>"})
    head = tiny_head(target, tokenizer=more)
    with pytest.raises(ValueError, match=f"`--vocab-size {VOCABULARY}` if it has more tokens"):
        head.ngram = build([[1, 2]], tmp_path / "whole", tokenizer=more)
    head.ngram = build([[1, 2]], tmp_path / "cut", tokenizer=more, vocab_size=VOCABULARY)


def test_generate_with_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "table")
    assert main(["ngram", "build", path, "--text", __file__]) == 0
    assert main(["generate", "import os\n", "--ngram", path, "--max-new-tokens", "8"]) == 0
    assert main(["generate", "import os\n", "--ngram", __file__]) == 2
    assert "cannot be read as an n-gram table" in capsys.readouterr().err
