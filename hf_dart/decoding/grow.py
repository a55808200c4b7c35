"""Trees of one round from a proposal: rank tokens, add copies of earlier text, score neighbours, grow.

Nothing here can change the output; it only decides what is worth verifying. So the target's processors are imitated
where that is cheap (temperature, repetition penalty, nucleus), and not run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_dart.decoding.grammars import grammars_of
from hf_dart.drafters.base import Drafter, Proposal
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.copies import NOTHING, Copies, CopyLevels, RowCopies, best_size, tree_of_copies, with_copies
from hf_dart.trees.costs import RoundCost
from hf_dart.trees.on_host import grow_on_host
from hf_dart.trees.scores import Candidates, DraftScores
from hf_dart.trees.tree import DraftTree, after_draft, best_chain
from hf_dart.trees.vocabulary import columns_of

# The nucleus is searched among this many tokens.
_NUCLEUS = 64

Drafting = Callable[[], AbstractContextManager[None]]
"""Maker of contexts in which a drafter computes while trees grow; its time is one of drafts."""


class TreeGrower:
    """Grower of the trees of one `generate` call.

    Attributes:
        copied: what is copied from, and how often that was right, of each row.
        grammars: that the rows' texts have to follow, where they are known.
    """

    def __init__(
        self,
        drafter: Drafter[Any],  # whose proposals grow
        config: TreeConfig,
        processors: LogitsProcessorList,  # of the call, to be imitated in the ranking
        texts: list[list[int]],  # per row its token ids, without padding; shared lists, which grow from outside
        device: torch.device,  # of the target
        ends: Collection[int] = (),  # tokens that end a text
        cost: Callable[[bool], RoundCost] | None = None,  # of a round, drafted or not; None for those of `config`
        memory: Any = None,  # texts of earlier calls, which are copied, too
        chances: Sequence[float] | None = None,  # as for `RowCopies`
        size: float = inf,  # V of the target: ids from it on, as some images have, are not copied
    ) -> None:
        self._drafter, self._config, self._texts = drafter, config, texts
        self._ends = sorted(ends)
        self.depth = config.resolve_depth(drafter.draft_length)
        self._most = config.resolve_nodes(len(texts), device.type)  # nodes per row
        self._rank = Ranker(processors, config.top_k)
        self._seen = SeenTokens(texts) if self._rank.needs_history else None
        self.copied = [RowCopies(text, memory, chances, size) for text in texts]
        self.grammars = grammars_of(processors, texts)
        self._formula = DraftScores(config, drafter.ngram)
        self._cost = cost or partial(config.round_cost, len(texts), device.type)

    @classmethod
    def joint(cls, growers: list[TreeGrower], most: int, cost: Callable[[bool], RoundCost]) -> TreeGrower:
        """Make a grower of the rows of several that are of one config and `ranks_by` the same; it needs `copies`."""
        joint = copy(growers[0])
        joint._texts = [text for grower in growers for text in grower._texts]
        joint._most, joint._cost, joint.copied = most, cost, []
        joint.grammars = [grammar for grower in growers for grammar in grower.grammars]
        joint._seen = SeenTokens(joint._texts) if joint._rank.needs_history else None
        return joint

    @property
    def ranks_by(self) -> Hashable:
        """Key of the growers that rank tokens in the same way."""
        return tuple(self._ends), *vars(self._rank).values()

    def __call__(
        self,
        proposal: Proposal | None,  # `depth` distributions per row; None where copied text alone grows
        gumbel: Tensor | None,  # [B, depth, V or M] the noise that the target will draw with; None to rank without it
        deepest: list[int],  # deepest node per row
        refine: Callable[[Tensor], Proposal] | None = None,  # `Drafter.refine` of that proposal
        weights: list[float] | None = None,  # of a token more in each row (`pace.row_weights`); None for the mean
        ended: list[bool] | None = None,  # the rows that have ended and run on, which no token ends again
        copies: Sequence[Copies] | None = None,  # what `copies` found for this round; None looks for it
        drafting: Drafting = nullcontext,  # in which the drafter runs once more
    ) -> DraftTree:
        """Return the trees [B, N] after the last committed tokens, on the CPU."""
        found = self.copies(deepest, ended) if copies is None else copies
        if self._most == 1 or proposal is None:
            size = min(self._most - 1, max(map(len, found)))
            if size and self._config.nodes is None:  # as many as pay
                size, *_ = best_size(found, weights or [1 / len(found)] * len(found), self._cost(False))
            return tree_of_copies([text[-1] for text in self._texts], found, size)
        # With squared chances: where the drafter expects another token, weak ones are seldom right.
        levels = CopyLevels.of(found)
        levels = replace(levels, totals=2 * levels.totals)
        for row, grammar in enumerate(self.grammars):
            if grammar is not None:
                grammar.restrict(proposal, row)
        seen = None if self._seen is None else self._seen(proposal.logits, proposal.vocabulary)
        again: list[Tensor] = []
        if refine is not None and self._config.refine and self.depth > 1:
            tokens, scores, *again = self._refine(proposal, gumbel, seen, refine, drafting)
        else:
            tokens, scores = self._rank(proposal.logits, gumbel, seen, proposal.vocabulary)
        if levels.tokens.size:
            # Copied tokens join the candidates, so that a drafted token after one is scored like any other.
            copied = torch.from_numpy(levels.by_depth(tokens.shape[1]))
            tokens, scores = with_copies(tokens, scores, copied.to(tokens.device))
        steps = self._steps(proposal, tokens, scores, drafting)
        if again:
            draft, better = again
            steps = after_draft(draft, better, tokens, steps)
        # Scores look at the last tokens of each text, padded with -1.
        length = max(self._formula.context, 1)
        history = np.array([[-1] * (length - len(text)) + text[-length:] for text in self._texts])
        columns, scored = tokens.cpu().numpy(), steps.detach().cpu().double().numpy()
        # `np.isin` takes longer for the few that there are.
        ending = np.logical_or.reduce([columns == end for end in self._ends]) if self._ends else None
        if ending is not None and ended is not None:
            ending[ended] = False
        candidates = Candidates(history, columns, scored, self._formula, levels, deepest, ending)
        cost = self._cost(True) if self._config.nodes is None else None
        # Without a table, scoring more paths costs almost nothing.
        beam = self._config.beam if self._formula.context else None
        return grow_on_host(candidates, nodes=self._most, beam=beam, cost=cost, weights=weights)

    def score(self, logits: Tensor, gumbel: Tensor | None) -> Tensor:
        """Log-scores [B, W, V] of the logits [B, W, V] of one depth, its noise being `gumbel` [B, 1, V]."""
        seen = None if self._seen is None else self._seen(logits)
        return self._rank.scores(logits, gumbel, seen)

    def _refine(
        self,
        proposal: Proposal,
        gumbel: Tensor | None,
        seen: Tensor | None,
        refine: Callable[[Tensor], Proposal],
        drafting: Drafting,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Candidates [B, d, K] of the first draft and the last one, and their scores in either, [B, d, K].

        Before the last ones come the tokens [B, d] of the draft that they are scored after.
        """
        vocabulary = proposal.vocabulary
        first = self._rank.scores(proposal.logits, gumbel, seen)
        candidates, (scores,) = self._rank.best(first, vocabulary=vocabulary)
        draft = best_chain(candidates, self._steps(proposal, candidates, scores, drafting))
        again, looked_at = first, draft
        for number in range(self._config.refine):
            if number:
                best = self._rank.best(again, vocabulary=vocabulary)[0][..., 0]
                draft = torch.cat([draft[:, :1], best[:, 1:]], dim=1)
                if torch.equal(draft, looked_at):
                    break
            with drafting():
                logits = refine(draft).logits
            later = self._rank.scores(logits, gumbel, seen)
            again, looked_at = torch.cat([first[:, :1], later[:, 1:]], dim=1), draft
        candidates, (scores, better) = self._rank.best(first, again, vocabulary=vocabulary)
        return candidates, scores, looked_at, better

    def _steps(self, proposal: Proposal, tokens: Tensor, scores: Tensor, drafting: Drafting) -> Tensor:
        """[B, d, J, K] log-scores of candidates [B, d, K] after each of the depth before, from those alone [B, d, K].

        By the drafter's selector; without one J is 1, and they are the scores alone.
        """
        if not self._config.selector:
            return scores[:, :, None]
        roots = torch.tensor([text[-1] for text in self._texts])
        with drafting():
            table = self._drafter.transitions(proposal, roots.to(tokens.device), tokens, scores)
        return scores[:, :, None] if table is None else table

    def copies(self, deepest: list[int], ended: list[bool] | None = None) -> list[Copies]:
        """Return the earlier text of each row that may be copied after its last committed token."""
        limits = [max(min(self._config.lookup, most), 0) for most in deepest]
        if not any(limits) or self._most == 1:  # a tree of one node holds no copy
            return [NOTHING] * len(deepest)
        ends: list[Collection[int]] = [() if over else self._ends for over in ended or [False] * len(deepest)]
        rows = zip(self.copied, limits, ends, strict=True)
        found = [row.suggest(most, these) if most else NOTHING for row, most, these in rows]
        for row, grammar in enumerate(self.grammars):
            if grammar is not None and not (ended and ended[row]):
                found[row] = grammar.copies(found[row], limits[row])
        return found


class Ranker:
    """Turns draft logits into `top_k` scored candidates per depth, K of them, as `processors` would."""

    def __init__(self, processors: LogitsProcessorList, top_k: int) -> None:
        self._top_k = top_k
        self._penalty = 1.0
        self._temperature = 1.0
        self._top_p = 1.0
        self._limit = 0
        for processor in processors:
            if isinstance(processor, RepetitionPenaltyLogitsProcessor):
                self._penalty *= processor.penalty
            elif isinstance(processor, TemperatureLogitsWarper):
                self._temperature *= processor.temperature
            elif isinstance(processor, TopPLogitsWarper):
                self._top_p = min(self._top_p, processor.top_p)
            elif isinstance(processor, TopKLogitsWarper):
                self._limit = processor.top_k
        self.needs_history = self._penalty != 1.0  # the ranking depends on the tokens so far

    def __call__(
        self, logits: Tensor, gumbel: Tensor | None, seen: Tensor | None, vocabulary: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Candidates [B, d, K], best first, and their scores [B, d, K], by what `scores` takes."""
        scores, columns = self._scores(logits, gumbel, seen)
        best, tokens = scores.topk(min(self._top_k, scores.shape[-1]))
        tokens = tokens if columns is None else columns.gather(-1, tokens)
        return tokens if vocabulary is None else vocabulary[tokens], best

    def scores(self, logits: Tensor, gumbel: Tensor | None, seen: Tensor | None) -> Tensor:
        """Log-scores of all tokens, by a drafter's logits [B, d, V], or [B, d, M] of the tokens of its vocabulary.

        A repetition penalty applies to tokens that were `seen` [B, V or M]. With the noise `gumbel` [B, d, V or M] of
        the target, a score is how sure the coupled draft is that the target will draw this very token.
        """
        scores, columns = self._scores(logits, gumbel, seen)
        return scores if columns is None else scores.new_full(logits.shape, -inf).scatter(-1, columns, scores)

    def best(self, *scores: Tensor, vocabulary: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Return candidates [B, d, K] of several drafts, those that score best in any, and their `scores` in each."""
        either = torch.stack(scores).amax(0)
        columns = either.topk(min(self._top_k, either.shape[-1])).indices
        tokens = columns if vocabulary is None else vocabulary[columns]
        return tokens, [each.gather(-1, columns) for each in scores]

    def _scores(self, logits: Tensor, gumbel: Tensor | None, seen: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Log-scores [B, d, W] of the tokens that may be drawn, and their columns [B, d, W]; None for all."""
        logits, columns = logits.float(), None
        if seen is not None:
            penalised = torch.where(logits > 0, logits / self._penalty, logits * self._penalty)
            logits = torch.where(seen[:, None], penalised, logits)
        if gumbel is not None:
            logits, columns = self._warp(logits)
            noise = gumbel.to(logits.device)
            logits = logits + (noise if columns is None else torch.take_along_dim(noise, columns, -1))
        return logits.log_softmax(-1), columns

    def _warp(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [B, d, W] of the tokens that the call's filters keep, the others -inf, and their columns, or None."""
        if self._temperature != 1.0:
            logits = logits / self._temperature
        if self._top_p == 1.0 and not self._limit:
            return logits, None
        best, columns = logits.topk(min(self._limit or _NUCLEUS, logits.shape[-1]))
        if self._top_p < 1.0:
            chances = best.softmax(-1) if self._limit else logits.softmax(-1).gather(-1, columns)
            # The nucleus holds every token before which less than top_p of the mass lies.
            best = best.masked_fill(chances.cumsum(-1) - chances >= self._top_p, -inf)
        return best, columns


class SeenTokens:
    """Set of the tokens that occur in each row's text, kept up as the texts grow."""

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts = texts
        self._marked = [0] * len(texts)
        self._seen: Tensor | None = None

    def __call__(self, logits: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """[B, V] bool ([B, M] of a draft vocabulary), on the device of the draft's `logits` [B, d, V] or [B, d, M]."""
        if self._seen is None:
            self._seen = torch.zeros(logits.shape[0], logits.shape[-1] + 1, dtype=torch.bool, device=logits.device)
        none = self._seen.shape[1] - 1  # column of the tokens that have no logit
        for row, text in enumerate(self._texts):
            columns = torch.tensor(text[self._marked[row] :], dtype=torch.long, device=logits.device)
            columns = columns.clamp(max=none) if vocabulary is None else columns_of(columns, vocabulary, none)
            self._seen[row, columns] = True
            self._marked[row] = len(text)
        return self._seen[:, :none]
