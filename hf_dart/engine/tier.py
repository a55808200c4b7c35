"""One tier: a round's state for texts up to T tokens, and how a call gets into it and out again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_dart.decoding.noise import NoiseStream
from hf_dart.decoding.rows import Rows
from hf_dart.engine.attention import PackedVerifier
from hf_dart.engine.budget import shared
from hf_dart.engine.cache import FixedCache, FixedDraftCache
from hf_dart.engine.fixed_round import FixedRound
from hf_dart.engine.graphs import Capture, Launch
from hf_dart.engine.job import HeadJob
from hf_dart.engine.processing import FixedProcessors
from hf_dart.engine.state import Shape, State
from hf_dart.engine.trial import difference
from hf_dart.models.tolerance import allowance, coarsest
from hf_dart.trees.copies import BatchLookup
from hf_dart.trees.tree import DraftTree


class Tier:
    """A `FixedRound` with its state, made for calls like that of `job`.

    Attributes:
        seats: which rows of the call that is loaded its rows are, ascending.

    Args:
        shape: of the round.
        job: of a call; others like it may come.
        capture: how.
    """

    def __init__(self, shape: Shape, job: HeadJob, capture: Capture) -> None:
        backend, pool, memory, hands_down = capture
        features = job.session.seen.features
        device = features.device
        self.shape, self.seats = shape, list(range(shape.batch))
        # Also for calls in inference mode: what is made there could not be written outside of it later.
        with torch.inference_mode(False), torch.no_grad():
            self.cache = FixedCache(job.cache, shape.batch, shape.slots, shape.bucket, device, memory, shape.budget)
            self.draft = FixedDraftCache.of(job.draft_state, shape.batch, shape.draft_slots, memory)
            self.state = State.empty(shape, features, memory)
        verifier = self._verifier = PackedVerifier(job.verify, self.cache, hands_down)
        self._supplied = 0  # positions whose noise was handed on
        self._places: Tensor | None = None  # of the seats in blocks of noise; None where all rows have one
        processors = FixedProcessors(job.session.request.processors, shape.vocab_size, device)
        ngram = job.head.ngram if shape.tree.ngram_weight else None
        self.text = None
        if shape.tree.lookup or ngram is not None:
            self.text = BatchLookup(shape.batch, shape.slots + shape.path + 1, shape.tree.lookup, device)
        self.round = FixedRound(
            shape, job.head, verifier, self.cache, self.draft, self.state, processors, backend, self.text, ngram
        )
        self.round.propose()  # what the head makes on first use is there before anything is traced
        self.launch = Launch(self.round, device, pool, self.round.run_uncompiled)

    def has_room(self, running: list[tuple[int, int]], rounds: int) -> bool:
        """May so many more rounds be run here?

        Args:
            running: committed tokens of each row that still runs, and how many more it may emit.
        """
        return max(length for length, _ in running) + rounds * self.shape.path <= self.shape.slots

    def load(self, job: HeadJob) -> None:
        """Take over where a session stands, of the rows that run and as many others as there are seats for."""
        state, rows, cache = self.state, job.rows, job.cache
        runs = [room > 0 for room in rows.rooms]
        seats = self.seats = sorted(sorted(range(len(rows)), key=lambda row: not runs[row])[: self.shape.batch])
        held = torch.tensor([runs[row] or job.returns_cache for row in seats])
        for mine, given in ((self.cache, cache), (self.draft, job.draft_state)):
            # Of rows that have ended one entry is left, which their roots follow.
            lengths = torch.where(held, given.lengths.cpu()[seats], 1)
            mine.store.clear_from(0)  # what another call left here might be NaN
            pairs = [(seat, row) for seat, row in enumerate(seats) if held[seat]]
            mine.store.copy_from(given.store, int(lengths.max()), pairs)
            mine.lengths.copy_(lengths)
        self.cache.load_states(cache, seats)
        self.round.whole = True
        self._verifier.load(job.verify, seats)
        taken, next_tokens, counts = (part[seats] for part in job.session.seen)
        width = taken.shape[1]
        state.features.zero_()
        state.features[:, :width] = taken
        last = torch.tensor([rows.tokens[row][-1] for row in seats])
        state.roots.copy_(last)
        state.next_tokens.copy_(last[:, None].expand_as(state.next_tokens))
        state.next_tokens[:, :width] = next_tokens
        state.counts.copy_(counts)
        state.emitted.copy_(torch.tensor([rows.emitted[row] for row in seats]))
        state.limits.fill_(rows.max_length - rows.prompt_length)
        state.ended.copy_(torch.tensor([not runs[row] for row in seats]))
        state.ends.zero_()
        ends = [token for token in rows.end_tokens or () if 0 <= token < len(state.ends)]
        state.ends[torch.tensor(ends, dtype=torch.long, device=state.ends.device)] = True
        state.turn.zero_()
        self.round.processors.load(job.session.request.processors, rows, seats, state.seen)
        if self.text is not None:
            # Of rows that have ended nothing is copied, and there may be no room for what they say.
            self.text.load([rows.tokens[row] if runs[row] else rows.tokens[row][-1:] for row in seats])
        self._supplied = rows.slowest()
        # Not a list, which would be brought to the device for every position.
        self._places = None if len(seats) == len(rows) else torch.tensor(seats, device=rows.device)
        state.ready.copy_(state.limits[0])  # nobody waits for noise before there is some

    def supply(self, noise: NoiseStream, rows: Rows) -> None:
        """Have the noise ready that a round may need; that of positions which all rows have passed makes room."""
        slowest = rows.slowest()
        noise.forget_before(slowest)
        end = min(slowest + self.shape.noise_rows, rows.max_length - rows.prompt_length)
        if end <= self._supplied:
            return
        for position in range(self._supplied, end):
            place = self.state.noise[position % self.shape.noise_rows]
            if self._places is None:
                noise.draw_into(place, position)
            else:
                place.copy_(noise.block(position).index_select(0, self._places))
        self.state.ready.fill_(end)
        self._supplied = end

    def unload(self, job: HeadJob) -> None:
        """Bring the session to where this tier stands. Waits for the device."""
        if job.session.noise is not None:
            job.session.noise.take_back()  # other tiers have theirs in the same place
        self.cache.hand_to(job.cache, self.cache.lengths, self.seats, self.round.whole)
        if self.shape.depth:
            job.draft_state.take_in(self.draft, self.seats)
        taken, batch = self.state.features, len(job.rows)
        features, counts = taken.new_zeros(batch, *taken.shape[1:]), torch.zeros(batch, dtype=torch.long)
        features[self.seats], counts[self.seats] = taken, self.state.counts.cpu()
        path = torch.arange(self.shape.path).expand(batch, -1)
        job.session.seen = job.rows.take(features, path, counts.tolist())

    def of_call(self, emitted: list[list[int]], batch: int) -> list[list[int]]:
        """What a round brought each of a call's rows, from what it brought those that have a seat."""
        brought = dict(zip(self.seats, emitted, strict=True))
        return [brought.get(row, []) for row in range(batch)]

    def differs(self, job: HeadJob) -> Iterator[tuple[float, float]]:
        """Hold this tier against what it stands for, loaded with a session.

        First trees of random tokens on fixed shapes against the eager round's verification of them; then what is
        launched, compiled and captured, against the round as it is written, by the hidden states of the roots.

        Yields:
            How far each is off, and how far it may be, as `trial.difference`.
        """
        self.load(job)
        error, allowed, dtype = self._verifies(job)
        yield error, allowed
        roots = []
        for launch in (self.round.run_uncompiled, self.launch):
            self.load(job)
            launch()
            roots.append(self.state.features[:, 0].clone())
        running = torch.tensor(job.rows.rooms, device=roots[0].device)[self.seats] > 0
        gap = (roots[0].double() - roots[1].double()).abs().amax(-1).masked_fill(~running, 0)
        yield float(gap.max()), allowance(coarsest(roots[0], dtype)) * float(roots[0].abs().max())

    def _verifies(self, job: HeadJob) -> tuple[float, float, torch.dtype]:

        def verify(tree: DraftTree, running: Tensor) -> tuple[Tensor, Tensor]:
            size, tree = tree.size, tree.padded(self.shape.bucket)
            if self.shape.budget is not None:
                tree = shared(tree, running, self.shape.budget)
            with self.round.verifier.packed():
                logits, _, places = self.round.verify(tree)
            assert tree.scores is not None
            return logits[places[:, :size]], tree.scores[:, :size] > -torch.inf

        return difference(job, self.seats, self.shape.bucket, verify)
