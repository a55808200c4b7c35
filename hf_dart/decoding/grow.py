"""From a proposal to the trees of one round: rank, look up, score pairs, grow."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_dart.configuration import TreeConfig
from hf_dart.decoding.calibration import Calibration
from hf_dart.decoding.candidates import Ranker, SeenTokens
from hf_dart.decoding.proposer import Proposal, Proposer
from hf_dart.decoding.refinement import Refined, best_chain
from hf_dart.decoding.walk import Accepted
from hf_dart.lookup import Graft, RowLookup, padded, with_copies
from hf_dart.trees.best_first import RowDraft, best_first
from hf_dart.trees.by_depth import Drafts, by_depth
from hf_dart.trees.costs import RoundCost
from hf_dart.trees.scoring import BeamScores, HostScores, PathScores
from hf_dart.trees.tree import DraftTree, Transitions, grow_tree


class TreeGrower:
    """Grows the trees of one `generate` call. Nothing here can change the output.

    Args:
        drafter: whose proposals grow.
        config: how.
        processors: of the call, to be imitated in the ranking.
        texts: per row its token ids so far, without padding; the lists are shared and grow from outside.
        device: where the target takes its input ids.
    """

    def __init__(
        self,
        drafter: Proposer[Any],
        config: TreeConfig,
        processors: LogitsProcessorList,
        texts: list[list[int]],
        device: torch.device,
    ) -> None:
        self._drafter, self._config, self._texts, self._device = drafter, config, texts, device
        self.depth = min(config.depth or drafter.draft_length, drafter.draft_length)
        self._rank = Ranker(processors, config.top_k)
        self._seen = SeenTokens(texts) if self._rank.needs_history else None
        self._lookups = [RowLookup(text) for text in texts]
        self._calibration = Calibration() if config.calibrate else None
        self._scores = PathScores(config, drafter.ngram, self._calibration)
        self._copied: list[list[int]] = []
        self._shares: list[float] | None = None

    def __call__(
        self,
        proposal: Proposal | None,
        gumbel: Tensor | None,
        deepest: list[int],
        refine: Callable[[Tensor], Proposal] | None = None,
        chain: bool = False,
        shares: list[float] | None = None,
    ) -> DraftTree:
        """The trees [B, N] behind the last committed tokens.

        Args:
            proposal: `depth` distributions per row; None while drafting pauses, when copied text alone grows.
            gumbel: [B, depth, V] the noise that the target will sample those positions with; None for greedy,
                or to rank without it.
            deepest: deepest node per row.
            refine: `Proposer.refine` of that proposal; needed where `TreeConfig.refine` asks for it.
            chain: of the proposal, take the likeliest token of each depth alone, and do not refine.
            shares: what a token of each row counts for where trees are sized by their worth (`pace.shares`); None is
                as much in all.
        """
        if self._most == 1:
            return self._bare()
        self._shares = shares
        copies = self._copies(deepest)
        self._copied = [copied for copied, _ in copies]
        if proposal is None:
            if not any(copied for copied, _ in copies):
                return self._bare()
            none: list[list[Any]] = [[] for _ in copies]
            return self._best_first(none, none, copies, deepest, drafted=False).to(self._device)
        seen = None if self._seen is None else self._seen(proposal.logits, proposal.vocabulary)
        refined = None
        if refine is not None and self._config.refine and self.depth > 1 and not chain:
            candidates, scores, refined = self._refine(proposal, gumbel, seen, refine)
        else:
            ranked = self._rank(proposal.logits, gumbel, seen, proposal.vocabulary)
            candidates, scores = (part.to(self._device)[..., : 1 if chain else None] for part in ranked)
        grow = self._on_host if self._device.type == "cpu" else self._on_device
        return grow(proposal, candidates, scores, refined, copies, deepest)

    def _refine(
        self, proposal: Proposal, gumbel: Tensor | None, seen: Tensor | None, refine: Callable[[Tensor], Proposal]
    ) -> tuple[Tensor, Tensor, Refined]:
        """Candidates [B, d, K] of the first draft and the last one, and their scores [B, d, K] in either."""
        vocabulary = proposal.vocabulary
        first = self._rank.scores(proposal.logits, gumbel, seen, vocabulary)
        candidates, (scores,) = self._rank.best(first, vocabulary=vocabulary)
        roots = torch.tensor(self._roots(), device=candidates.device)
        draft = best_chain(candidates, self._transitions(proposal, roots, candidates, scores))
        again, looked_at = first, draft
        for number in range(self._config.refine):
            if number:
                best = self._rank.best(again, vocabulary=vocabulary)[0][..., 0]
                draft = torch.cat([draft[:, :1], best[:, 1:]], dim=1)
                if torch.equal(draft, looked_at):
                    break
            later = self._rank.scores(refine(draft).logits, gumbel, seen, vocabulary)
            again, looked_at = torch.cat([first[:, :1], later[:, 1:]], dim=1), draft
        candidates, (scores, better) = self._rank.best(first, again, vocabulary=vocabulary)
        device = self._device
        return candidates.to(device), scores.to(device), Refined(looked_at.to(device), better.to(device))

    def score(self, logits: Tensor, gumbel: Tensor | None) -> Tensor:
        """Log-scores [B, W, V] of the logits [B, W, V] of one depth, its noise being `gumbel` [B, 1, V]."""
        seen = None if self._seen is None else self._seen(logits)
        return self._rank.scores(logits, gumbel, seen)

    def learn(self, tree: DraftTree, accepted: Accepted) -> None:
        """Take in what came of the last trees."""
        if self._calibration is not None and tree.scores is not None:
            self._calibration.learn(tree, accepted, self._copied)

    def _copies(self, deepest: list[int]) -> list[tuple[list[int], float]]:
        """What `RowLookup.suggest` finds for each row."""
        longest = min(self._config.lookup, max(deepest) + 1)
        return [lookup.suggest(longest) for lookup in self._lookups]

    def _on_host(
        self,
        proposal: Proposal,
        candidates: Tensor,
        scores: Tensor,
        refined: Refined | None,
        copies: list[tuple[list[int], float]],
        deepest: list[int],
    ) -> DraftTree:
        if self._scores.context:
            order = candidates.argsort(-1)  # lookups are quicker so
            candidates, scores = candidates.gather(-1, order), scores.gather(-1, order)
        tokens = candidates.numpy()
        copied, chances = padded(copies)
        if copied.shape[1]:
            # Copied tokens join the candidates, so that a drafted token behind one is scored like any other.
            tokens = with_copies(tokens, copied)
            candidates = torch.from_numpy(tokens)
            scores = torch.nn.functional.pad(scores, (0, 1), value=-inf)
        table = self._transitions(proposal, torch.tensor(self._roots()), candidates, scores, refined)
        pairs = scores[:, :, None] if table is None else table
        if self._scores.plain:
            return self._best_first(tokens.tolist(), pairs.tolist(), copies, deepest)
        steps = pairs.detach().double().numpy()
        with np.errstate(divide="ignore", invalid="ignore"):  # of what is no candidate
            if self._scores.context:
                history = np.array(self._history())
                scorer = HostScores(self._scores, tokens, steps)
                return self._by_depth(Drafts(history, tokens, scorer, deepest, copied, chances))
            drafted = self._scores.drafted(steps)
            scored = [self._scores.on_host(depth, drafted[:, depth]) for depth in range(drafted.shape[1])]
        return self._best_first(tokens.tolist(), np.stack(scored, axis=1).tolist(), copies, deepest)

    def _bare(self) -> DraftTree:
        """The roots alone."""
        return DraftTree.chain(torch.tensor(self._roots(), device=self._device)[:, None])

    def _roots(self) -> list[int]:
        return [text[-1] for text in self._texts]

    def _best_first(
        self,
        tokens: list[list[Any]],
        pairs: list[list[Any]],
        copies: list[tuple[list[int], float]],
        deepest: list[int],
        drafted: bool = True,
    ) -> DraftTree:
        """Trees of tokens [B][d][K] and their scores [B][d][J][K]."""
        parts = zip(self._roots(), tokens, pairs, deepest, copies, strict=True)
        drafts = [RowDraft(root, row, scored, limit, *copy) for root, row, scored, limit, copy in parts]
        return best_first(drafts, nodes=self._most, cost=self._cost(drafted), shares=self._shares)

    def _by_depth(self, drafts: Drafts) -> DraftTree:
        """As `_best_first`, where a score depends on more than the token in front."""
        return by_depth(
            drafts, nodes=self._most, beam=self._config.beam, cost=self._cost(True), shares=self._shares
        )

    @property
    def _most(self) -> int:
        """Nodes per row."""
        return self._config.resolve_nodes(len(self._texts), self._device.type)

    def _cost(self, drafted: bool) -> RoundCost | None:
        """That trees are sized by, if they are."""
        if self._config.nodes is not None:
            return None
        return self._config.round_cost(len(self._texts), self._device.type, drafted)

    def _on_device(
        self,
        proposal: Proposal,
        candidates: Tensor,
        scores: Tensor,
        refined: Refined | None,
        copies: list[tuple[list[int], float]],
        deepest: list[int],
    ) -> DraftTree:
        graft = Graft.of(copies, self._device)
        if graft is not None:
            candidates, scores = graft.extend(candidates, scores)
        history = torch.tensor(self._history(), device=self._device)
        limited = min(deepest) < candidates.shape[1]
        return grow_tree(
            history,
            candidates,
            scores,
            nodes=self._most,
            beam=self._config.beam,
            depth_limit=torch.tensor(deepest, device=self._device) if limited else None,
            scorer=self._scorer(proposal, history[:, -1], candidates, scores, refined, graft),
        )

    def _history(self) -> list[list[int]]:
        """[B][C] as many of the last committed tokens as scores depend on, the root at least; -1 in front of a text."""
        length = max(self._scores.context, 1)
        return [[-1] * (length - len(text)) + text[-length:] for text in self._texts]

    def _scorer(
        self,
        proposal: Proposal,
        roots: Tensor,
        candidates: Tensor,
        scores: Tensor,
        refined: Refined | None,
        graft: Graft | None,
    ) -> BeamScores | None:
        """What makes a candidate depend on the path in front of it: selector, refined draft, n-grams, copies."""
        drafted = slice(0, self.depth)
        table = self._transitions(proposal, roots, candidates[:, drafted], scores[:, drafted], refined)
        if table is None and graft is None and self._scores.plain:
            return None
        return BeamScores(self._scores, self.depth, None if table is None else Transitions(table), graft)

    def _transitions(
        self, proposal: Proposal, roots: Tensor, candidates: Tensor, scores: Tensor, refined: Refined | None = None
    ) -> Tensor | None:
        """As `Proposer.transitions`; behind the tokens of a refined draft, its scores."""
        table = self._drafter.transitions(proposal, roots, candidates, scores) if self._config.selector else None
        if refined is None:
            return table
        return refined.replace(candidates, scores[:, :, None] if table is None else table)
