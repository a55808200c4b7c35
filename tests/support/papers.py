"""Cases for the trees of DART's paper: what a head drafted, a text's last tokens, and the n-grams of a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LogitsProcessorList

from hf_dart import TreeConfig
from hf_dart.decoding.grow import TreeGrower
from hf_dart.drafters.base import Proposal
from hf_dart.trees.ngram.build import build
from support.tiny import tiny_head, tiny_target
from support.trees import paths

Tree = set[tuple[int, ...]]
NODES = 59


@dataclass(frozen=True)
class Cases:
    """C drafts of d depths with K candidates each.

    Attributes:
        corpus: [T] tokens whose trigrams are counted.
        context: [C, 2] the last tokens before each draft.
        tokens, logits: [C, d, K] the best candidates.
        end: the token that ends a text.
    """

    corpus: Tensor
    context: Tensor
    tokens: Tensor
    logits: Tensor
    end: int

    @staticmethod
    def load(path: Path) -> tuple[Cases, list[Tree]]:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        whole = {name: found[name].long() for name in ("corpus", "context", "tokens")}
        cases = Cases(**whole, logits=found["logits"], end=int(found["end"]))
        wanted = [{tuple(x for x in path if x >= 0) for path in tree} for tree in found["trees"].tolist()]
        return cases, wanted


def trees(cases: Cases, folder: Path) -> list[Tree]:
    """What `TreeConfig.paper()` grows of them."""
    vocabulary = 1 + int(max(part.max() for part in (cases.corpus, cases.context, cases.tokens)))
    head = tiny_head(tiny_target("llama", vocab_size=vocabulary), draft_length=cases.tokens.shape[1])
    head.ngram = build([cases.corpus.tolist()], folder / "ngrams", vocab_size=vocabulary)
    found = []
    for context, tokens, logits in zip(cases.context.tolist(), cases.tokens, cases.logits, strict=True):
        spread = torch.full((1, len(tokens), vocabulary), -inf).scatter(2, tokens[None], logits[None])
        none, cpu = LogitsProcessorList(), torch.device("cpu")
        grower = TreeGrower(head, TreeConfig.paper(), none, [context], cpu, {cases.end})
        found.append(paths(grower(Proposal(spread, spread), None, [len(tokens) + 1]), 0))
    return found
