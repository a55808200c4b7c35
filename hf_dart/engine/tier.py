"""One tier: a round's state for texts up to T tokens, and how a call gets into it and out again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_dart.engine.attention import PackedVerifier, packed
from hf_dart.engine.budget import rows_paid_for, shared
from hf_dart.engine.cache import FixedCache, FixedDraft
from hf_dart.engine.fixed import FixedRound
from hf_dart.engine.graphs import Launch
from hf_dart.engine.processing import FixedProcessors
from hf_dart.engine.proof import allowance, difference
from hf_dart.engine.state import Shape, State
from hf_dart.engine.text import FixedText
from hf_dart.generation.cache import RaggedCache
from hf_dart.generation.noise import NoiseStream
from hf_dart.generation.rows import Rows
from hf_dart.generation.walk import Accepted
from hf_dart.head.drafting import DraftingModel
from hf_dart.trees.tree import DraftTree

if TYPE_CHECKING:
    from hf_dart.generation.decode import Call

# Tokens that a row has left to emit when its batch moves to rounds for fewer rows, which may have to be made first.
_WORTH_A_MOVE = 64


class Tier:
    """A `FixedRound` with its state, made for calls like `call`.

    Args:
        shape: of the round.
        call: a call that has been prefilled.
        features: [B, A, F] of what it verified.
        backend, pool: of `FixedRound` and `graphs.Launch`.
        hands_down: of `attention.PackedVerifier`.
    """

    def __init__(
        self, shape: Shape, call: Call, features: Tensor, backend: str | None, pool: Any, hands_down: bool
    ) -> None:
        assert isinstance(call.cache, RaggedCache)
        assert isinstance(call.drafter, DraftingModel)
        device = features.device
        self.shape = shape
        # Also for calls in inference mode: what is made there could not be written outside of it later.
        with torch.inference_mode(False), torch.no_grad():
            self.cache = FixedCache(call.cache, shape.slots, shape.bucket, device, shape.budget)
            self.draft = FixedDraft.of(call.draft.state, shape.draft_slots)
            self.state = State.empty(shape, features)
        verifier = PackedVerifier(
            call.model, self.cache, call.verify.kinds, call.drafter.feature_layers, hands_down=hands_down
        )
        self._supplied = 0  # positions whose noise was handed on
        processors = FixedProcessors(call.processors, shape.vocab_size, device)
        ngram = call.drafter.ngram if shape.tree.ngram_weight else None
        self.text = None
        if shape.tree.lookup or ngram is not None:
            self.text = FixedText(shape.batch, shape.slots + shape.path + 1, shape.tree.lookup, device)
        self.round = FixedRound(
            shape, call.drafter, verifier, self.cache, self.draft, self.state, processors, backend, self.text, ngram
        )
        self.round.guess()  # what the head makes on first use is there before anything is traced
        self.launch = Launch(self.round, device, pool)

    def suits(self, running: list[tuple[int, int]], rounds: int) -> bool:
        """May so many more rounds be run here?

        Args:
            running: committed tokens of each row that still runs, and how many more it may emit.
        """
        shape, longest = self.shape, max(length for length, _ in running)
        if longest + rounds * shape.path > shape.slots:
            return False
        # Rows have ended, and a smaller budget will do.
        smaller = shape.budget is not None and rows_paid_for(len(running), shape.batch) < shape.rows
        return not smaller or max(room for _, room in running) < _WORTH_A_MOVE

    def load(self, call: Call, features: Tensor, accepted: Accepted) -> None:
        """Take over where the eager round stands.

        Args:
            features: [B, N, F] of the last tree.
            accepted: what was accepted of it, not yet drafted from.
        """
        state, rows, cache = self.state, call.rows, call.cache
        assert isinstance(cache, RaggedCache)
        # What another call left here might be NaN.
        self.cache.store.copy_from(cache.store, cache.longest)
        self.cache.store.clear_from(cache.longest)
        self.cache.lengths.copy_(cache.lengths)
        draft = call.draft.state
        self.draft.store.copy_from(draft.store, draft.longest)
        self.draft.store.clear_from(draft.longest)
        self.draft.lengths.copy_(draft.lengths)
        taken, next_tokens, counts = call.verified(features, accepted)
        width = taken.shape[1]
        state.features.zero_()
        state.features[:, :width] = taken
        last = torch.tensor([text[-1] for text in rows.tokens])
        state.roots.copy_(last)
        state.next_tokens.copy_(last[:, None].expand_as(state.next_tokens))
        state.next_tokens[:, :width] = next_tokens
        state.counts.copy_(counts)
        state.emitted.copy_(torch.tensor(rows.emitted))
        state.limits.fill_(rows.max_length - rows.prompt_length)
        state.ended.copy_(torch.tensor(rows.rooms) <= 0)
        state.ends.zero_()
        ends = [token for token in rows.end_tokens or () if 0 <= token < len(state.ends)]
        state.ends[torch.tensor(ends, dtype=torch.long, device=state.ends.device)] = True
        state.turn.zero_()
        self.round.processors.load(call.processors, rows, state.seen)
        if self.text is not None:
            self.text.load(rows.tokens)
        self._supplied = rows.slowest()
        state.ready.copy_(state.limits[0])  # nobody waits for noise before there is some

    def supply(self, noise: NoiseStream, rows: Rows) -> None:
        """Have the noise ready that a round may need; that of positions which all rows have behind them makes room."""
        slowest = rows.slowest()
        noise.forget_before(slowest)
        end = min(slowest + self.shape.noise_rows, rows.max_length - rows.prompt_length)
        if end <= self._supplied:
            return
        for position in range(self._supplied, end):
            self.state.noise[position % self.shape.noise_rows].copy_(noise.block(position))
        self.state.ready.fill_(end)
        self._supplied = end

    def unload(self, call: Call) -> tuple[Tensor, Accepted]:
        """Let the eager round go on from here; what `load` is to be given next.

        Waits for the device.
        """
        assert isinstance(call.cache, RaggedCache)
        call.cache.take_in(self.cache.store, self.cache.lengths)
        if self.shape.depth:
            call.draft.state.take_in(self.draft)
        counts = self.state.counts.tolist()
        path = torch.arange(self.shape.path).expand(len(counts), -1)
        return self.state.features.clone(), Accepted(path, counts)

    def differs(self, call: Call, features: Tensor, accepted: Accepted) -> Iterator[tuple[float, float]]:
        """Hold this tier against what it stands for, loaded with what `load` is to be given.

        First trees of random tokens on fixed shapes against the eager round's verification of them; then what is
        launched, compiled and captured, against the round as it is written, by the hidden states of the roots.

        Yields:
            How far each is off, and how far it may be, as `proof.difference`.
        """
        self.load(call, features, accepted)
        yield self._verifies(call)
        roots = []
        for launch in (self.round.as_written, self.launch):
            self.load(call, features, accepted)
            launch()
            roots.append(self.state.features[:, 0].clone())
        running = torch.tensor(call.rows.rooms, device=features.device) > 0
        gap = (roots[0].double() - roots[1].double()).abs().amax(-1).masked_fill(~running, 0)
        yield float(gap.max()), allowance(roots[0])

    def _verifies(self, call: Call) -> tuple[float, float]:

        def verify(tree: DraftTree, running: Tensor) -> tuple[Tensor, Tensor]:
            size, tree = tree.size, tree.padded(self.shape.bucket)
            if self.shape.budget is not None:
                tree = shared(tree, running, self.shape.budget)
            with packed(call.model):
                logits, _, places = self.round.verify(tree)
            assert tree.scores is not None
            return logits[places[:, :size]], tree.scores[:, :size] > -torch.inf

        return difference(call, self.shape.bucket, self.shape.vocab_size, verify)
