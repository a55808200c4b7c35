"""`Drafter`: what `assistant=` takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.decoding.api import speculative_generate
from hf_dart.decoding.proposal import AT_ONCE, Proposal, Verified
from hf_dart.decoding.proposer import Proposer, State
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.ngram.table import NgramTable
from hf_dart.trees.vocabulary import columns_of


class Drafter(Proposer[State]):
    """A drafter for `model.generate(..., assistant=drafter)`; subclass it for one of your own.

    It implements `draft_length`, `feature_layers`, `check_target`, `begin`, `extend` and `propose`, and sets
    `tree_config` and `last_stats`; trees, sampling, batches, caches and statistics then work as they are.
    """

    def generate(
        self, model: PreTrainedModel, input_ids: Tensor, tree_config: TreeConfig | None = None, **kwargs: Any
    ) -> Any:
        """`model.generate(..., custom_generate=drafter.generate)`: drafting without `attach`.

        transformers passes neither `streamer` nor `tokenizer` on to a callable; `attach` does.

        Args:
            model: the target.
            input_ids: [B, P] as `generate` has prepared them.
            tree_config: replaces that of the drafter for this call.
            kwargs: the rest of what `generate` has prepared.

        Returns:
            What `model.generate` returns.

        Raises:
            ValueError: something was asked for that could not equal stock's output.
        """
        return speculative_generate(model, input_ids, assistant=self, tree_config=tree_config, **kwargs)

    def read_ahead(self, state: State, seen: Verified) -> Verified:
        """Take in all but the last positions of a long text, whose masks would be large; returns those."""
        if seen.next_tokens.shape[1] <= AT_ONCE:
            return seen
        ahead, last = seen.split()
        self.extend(state, *ahead)
        return last

    def _with_table(self, ngram: NgramTable | str | Path | None) -> Self:
        """The drafter with a table of n-grams, or the one at that path; None leaves it as it is."""
        if ngram is not None:
            self.ngram = ngram if isinstance(ngram, NgramTable) else NgramTable.load(ngram)
        return self


def pair_scores(
    proposal: Proposal,
    roots: Tensor,
    candidates: Tensor,
    scores: Tensor,
    added: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """`Proposer.transitions` of drafters that score pairs of tokens.

    Args:
        proposal, roots, candidates, scores: as for `Proposer.transitions`.
        added: what is added to logits, [B, d, J, K] of the hidden states [B, d, H], the candidates' logits [B, d, K],
            the tokens in front [B, d, J], and the candidates [B, d, K], as tokens and as columns of the logits.
    """
    depth, width = candidates.shape[1:]
    device, own = scores.device, proposal.hidden.device
    roots, candidates, scores = roots.to(own), candidates.to(own), scores.to(own)
    tokens = candidates.clamp(min=0)
    in_front = torch.cat([roots[:, None, None].expand(-1, 1, width), tokens[:, :-1]], dim=1)
    columns = tokens if proposal.vocabulary is None else columns_of(tokens, proposal.vocabulary, 0)
    logits = proposal.logits[:, :depth].gather(-1, columns)
    delta = added(proposal.hidden[:, :depth], logits, in_front, tokens, columns).float()
    # The candidates share out what the draft gave them together, again after each predecessor.
    together = scores.logsumexp(-1, keepdim=True)[:, :, None]
    return ((scores[:, :, None] + delta).log_softmax(-1) + together).to(device)
