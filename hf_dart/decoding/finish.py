"""The end of a call: its output, the cache and the generator as stock leaves them, and a state to go on with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor
from transformers import MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_dart.decoding.feed import leave
from hf_dart.decoding.request import FILL
from hf_dart.decoding.session import Session, joined
from hf_dart.decoding.stats import DraftStats
from hf_dart.drafters.base import Verified
from hf_dart.models.stock_steps import CACHE
from hf_dart.trees.tree import DraftTree


class DartGenerateOutput(GenerateDecoderOnlyOutput):
    """Stock's output and, in the attribute `draft_stats`, what the drafter did; its fields and keys are stock's."""

    draft_stats: DraftStats | None = None


def result(s: Session) -> Tensor | DartGenerateOutput:
    """Return the output of `generate` once all rows have ended; a cache that outlives the call gets stock's slots."""
    sequences = s.rows.sequences()
    for length in (one for one in s.request.criteria if type(one) is MaxLengthCriteria):
        # It reminds of a text that was longer than the target's positions and not done.
        length(sequences[:, : max(s.rows.max_length - 1, s.rows.prompt_length + 1)], None)
    if s.stats.trace is not None:
        s.stats.trace.end(s.rows.steps)
    if s.noise is not None:
        s.noise.leave_as_stock(s.rows.steps)
    if s.request.returns_cache:
        pending = joined([*s.pending, s.seen, *_even_out(s, sequences)])  # read one by one, each takes a forward
        s.cache.write_back(s.rows.steps - 1)
        request = s.request
        leave(s.cache.stock, request.drafter, s.drafter_state, pending, request.first_slot, sequences.clone())
    if not s.request.generation_config.return_dict_in_generate:
        return sequences
    output = DartGenerateOutput(
        sequences=cast(torch.LongTensor, sequences),
        scores=cast(Any, s.walk.scores),
        logits=cast(Any, s.walk.logits),
        hidden_states=None if s.hidden_states is None else cast(Any, tuple(s.hidden_states.steps)),
        **{CACHE: s.cache.stock},
    )
    output.draft_stats = s.stats
    return output


def _even_out(s: Session, sequences: Tensor) -> Iterator[Verified]:
    """Bring every row to where stock's cache ends, one token short of `sequences` [B, P + T].

    Stock runs the pad tokens after a row's end through the model too; these are the positions that come out.
    """
    prompt = s.cache.prompt_lengths
    wanted = prompt + s.rows.steps - 1
    too_long = s.cache.lengths > wanted
    s.cache.truncate(wanted)  # rows with running states are cut to their prompt, and filled from there
    while int((wanted - s.cache.lengths).max()) > 0:
        counts = (wanted - s.cache.lengths).clamp(max=FILL)
        nodes = torch.arange(int(counts.max()) + 1)
        starts = s.rows.prompt_length + s.cache.lengths - prompt
        columns = (starts[:, None] + nodes).clamp(max=sequences.shape[1] - 1).to(sequences.device)
        tokens = sequences.gather(1, columns)
        _, features = s.verify(DraftTree.chain(tokens[:, :-1], counts.to(tokens.device)), counts.tolist())
        s.cache.commit(nodes[:-1].expand(len(s.rows), -1), counts.tolist())
        yield Verified(features, tokens[:, 1:], counts.masked_fill(too_long, 0))  # those were verified before


def break_off(s: Session) -> None:
    """Leave the generator, and a cache that was passed in as stock would have where the call ends.

    The cache then holds the prompt and so much of the generated tokens as every row has committed.
    """
    if s.noise is not None:
        s.noise.leave_as_stock(s.streaming.position)
    if s.request.users_cache:
        committed = int((s.cache.lengths - s.cache.prompt_lengths).min())
        with suppress(RuntimeError):  # out of memory once more: it keeps the prompt alone
            s.cache.write_back(committed)
    s.tell_end(finished=False)
