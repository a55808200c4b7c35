"""Walk from verified logits to tokens: the target's own choice at every node that its text passes through.

Sampled tokens are drawn with the noise that `torch.multinomial` would draw, position by position, ahead of time
(`NoiseStream`): `torch.multinomial(p, 1)` returns `argmax(p / E)` with E ~ Exp(1) of p's shape drawn from the default
generator. Stock sampling draws one [B, V] block per output position, so block t belongs to position t whatever order
positions are decided in: a tree node of depth k below position t takes its token with block t + k, and the drafter may
look at the same blocks (Gumbel-max coupling of drafter and target).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList

from hf_dart.decoding.processors import Filters, of_rows, scores_alone
from hf_dart.decoding.request import Request
from hf_dart.decoding.rows import Rows
from hf_dart.models.devices import generator_state, set_generator_state, users_default
from hf_dart.trees.tree import DraftTree

MAX_LEAD = 32  # no row runs further ahead of the slowest unfinished row: a position costs B * V floats
_IN_CACHE = 2**18  # numbers of 8 bytes that stay in a core's cache from one operation to the next

# By device, the stream that will advance its default generator. Streams that run meanwhile, in other threads,
# must not draw the same noise, nor put it back.
_leading: WeakValueDictionary[torch.device, NoiseStream] = WeakValueDictionary()
_lock = Lock()


@dataclass(frozen=True)
class Accepted:
    """Nodes that a walk accepted of each row's tree.

    Attributes:
        counts: nodes of the path to commit, per row: the root and the accepted drafts. As many tokens were emitted, the
            last of them (the bonus token) not being in the tree. 0 for rows that stood still.
    """

    path: Tensor  # [B, A] nodes from the root on, on the CPU; entries after a row's count mean nothing
    counts: list[int]


class Walker:
    """Walker through verified trees by the processors, noise (None: greedily) and stopping rules of one call."""

    def __init__(self, request: Request, rows: Rows, noise: NoiseStream | None) -> None:
        self._processors = processors = request.processors
        self._rows, self._noise = rows, noise
        self._everywhere = chooses_everywhere(processors, rows.device)
        drawn_here = noise is not None and rows.device.type == "cpu"
        before, self._filters = Filters.split(processors) if drawn_here else (processors, None)
        self._of_rows = of_rows(before, len(rows))
        self.scores: tuple[Tensor, ...] | None = () if request.collects("output_scores") else None
        self.logits: tuple[Tensor, ...] | None = () if request.collects("output_logits") else None

    def __call__(self, tree: DraftTree, logits: Tensor, limits: list[int]) -> Accepted:
        """Walk every row from its root, by the target's logits [B, N, V], and emit the tokens that it passes.

        At most `limits[b]` of a row: with a limit of 0 it stands still.
        """
        in_step = self._rows.in_step
        chosen = self._choose_everywhere(tree, logits).tolist() if self._everywhere and not in_step else None
        children = _children(tree) if tree.size > 1 else [{}] * len(limits)
        paths: list[list[int]] = [[] for _ in limits]
        nodes = {row: 0 for row, limit in enumerate(limits) if limit}  # reached by each row
        while nodes and not (in_step and len(nodes) < len(paths)):
            emitted = self._step(nodes, logits) if in_step else self._emit(nodes, logits, chosen)
            for row, node in nodes.items():
                paths[row].append(node)
            nodes = {
                row: children[row][nodes[row], token]
                for row, token in emitted.items()
                if len(paths[row]) < limits[row] and (nodes[row], token) in children[row]
            }
        longest = max(1, *map(len, paths))
        padded = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
        return Accepted(padded, [len(path) for path in paths])

    def _emit(self, nodes: dict[int, int], logits: Tensor, chosen: list[list[int]] | None) -> dict[int, int]:
        """Emit the target's token at one node of each of some rows, and return those of rows that go on."""
        going_on = {}
        for row, node in nodes.items():
            token = chosen[row][node] if chosen else self._choose(row, logits[row : row + 1, node])
            if token < 0:  # as stock's `torch.multinomial` raises it
                raise RuntimeError("The target's logits give no probabilities (inf or nan), so no token can be drawn.")
            if self._rows.append(row, token):
                going_on[row] = token
            self._rows.send()
        return going_on

    def _step(self, nodes: dict[int, int], logits: Tensor) -> dict[int, int]:
        """Emit the target's tokens at one node of every row, in stock's own step; return them until all have ended."""
        with nullcontext() if self._noise is None or self._noise.given is None else _DrawsNothing():
            chosen = self._choose_as_stock(logits[torch.arange(len(nodes)), torch.tensor([*nodes.values()])])
            ids = self._rows.append_all(chosen, self.scores)
            self._rows.send()
            self._rows.take_over(ids)
        return {} if self._rows.finished else dict(enumerate(ids[:, -1].tolist()))

    def _choose_everywhere(self, tree: DraftTree, logits: Tensor) -> Tensor:
        """Return the target's token after every node, [B, N]; -1 where its scores are no distribution."""
        scores = logits.to(dtype=torch.float32, device=self._rows.device).flatten(0, 1)
        no_text = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)  # none of the processors reads it
        scores = _processed(self._processors, no_text, scores).view_as(logits)
        if self._noise is None:
            return scores.argmax(-1)
        window = self._noise.exponentials(self._rows.emitted, tree.max_depth + 1).to(scores.device)
        if tree.max_depth:
            window = window[torch.arange(len(window), device=window.device)[:, None], tree.depths.to(window.device)]
        best, tokens = scores.softmax(-1).div_(window).max(-1)
        return tokens.masked_fill(best.isnan(), -1)

    def _choose(self, row: int, logits: Tensor) -> int:
        """Return the target's next token of a row from its logits [1, V]."""
        # Some processors write to what they are given, and observers read the target's logits afterwards.
        logits = logits.to(dtype=torch.float32, device=self._rows.device, copy=bool(self._processors))
        ids = self._rows.ids(row)
        scores = _processed(self._of_rows[row], ids, logits)
        if self._noise is None:
            return largest(scores)
        noise = self._noise.exponential(row, self._rows.emitted[row])
        if self._filters is not None:
            token = self._filters.draw(scores, noise)
            if token is not None:
                return token
            scores = _processed(self._filters.processors, ids, scores)
        races = scores.softmax(-1) / noise
        token = largest(races)
        return -1 if races[0, token].isnan() else token

    def _choose_as_stock(self, logits: Tensor) -> Tensor:
        """Return the target's next tokens [B] from logits [B, V], call by call as in stock's `_sample`.

        Processors may draw from the global generator, so the tokens are drawn from it too; the noise stream is
        then a forecast.
        """
        logits = logits.to(copy=True, dtype=torch.float32, device=self._rows.device)
        ids = self._rows.ids_in_step()
        with users_default():
            scores = self._processors(ids, logits)
        self._rows.take_over(ids)
        if isinstance(scores, Tensor) and len(scores) != len(logits):
            raise ValueError(
                f"The logits processors leave scores of {len(scores)} rows for a batch of {len(logits)}; they have to "
                "return as many rows as they are given."
            )
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if self._noise is None:
            return torch.argmax(scores, dim=-1)
        return torch.multinomial(scores.softmax(-1), num_samples=1, generator=self._noise.given).squeeze(1)


class _DrawsNothing(TorchDispatchMode):
    """Context in which this thread draws from no default generator, where tokens are drawn from another one.

    Processors that draw share stock's generator with the tokens. Other threads may use it now.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
            if given.get("dropout_p", 0.0 if "attention" in func._schema.name else None) != 0.0:
                raise ValueError(
                    "A processor, criterion or streamer of this call draws random numbers, for which stock and the "
                    "tokens share one generator; run it by generate, without others at the same time."
                )
        return func(*args, **kwargs)


def chooses_everywhere(processors: LogitsProcessorList, device: torch.device) -> bool:
    """Return True if a token is chosen at every node in one call, rather than only along the accepted path.

    On an accelerator that saves reading back every token before the next one is chosen; on a CPU nothing is saved.
    """
    return device.type != "cpu" and scores_alone(processors)


def _processed(processors: Sequence[Any], ids: Tensor, scores: Tensor) -> Tensor:
    """Return scores [B, V] as known processors leave them; a list of them would read the signature of each one."""
    for processor in processors:
        scores = processor(ids, scores)
    return scores


def largest(scores: Tensor) -> int:
    """Return the first of the tokens with the largest of scores [1, V], or with nan, as `argmax` does.

    NumPy's takes a small part of the time on a CPU.
    """
    return int(scores.detach().numpy().argmax()) if scores.device.type == "cpu" else int(scores.argmax(-1))


def _children(tree: DraftTree) -> list[dict[tuple[int, int], int]]:
    """Return a map per row from (node, token) to the child that holds the token; roots are children of -1."""
    return [
        {place: child for child, place in enumerate(zip(parents, tokens, strict=True))}
        for parents, tokens in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    ]


class NoiseStream:
    """Blocks of Exp(1) noise [B, V] by output position, from a copy of the default generator.

    The default generator itself is moved once, by `leave_as_stock`. While another stream is alive on the device, the
    two calls run side by side: then nobody can say what stock would have drawn in either, and this one draws from a
    generator of its own, which a number from the default one seeds.

    Attributes:
        given: the generator whose numbers are drawn and moved in the place of the default one's; None for that one.
    """

    def __init__(
        self,
        batch_size: int,
        vocab_size: int,  # 0 if not known yet; the attribute is set before anything is drawn
        device: torch.device,
        *,
        forecast: bool = False,  # tokens will be drawn from the default generator itself, which is left alone
        generator: torch.Generator | None = None,  # `given`
    ) -> None:
        self._batch_size, self.vocab_size = batch_size, vocab_size
        self._device = device
        self._generator = torch.Generator(device)
        self._forecast, self.given = forecast, generator
        self._drawn = 0  # positions
        self._needed = 0  # the oldest position that a row still needs
        # By position; the oldest are dropped when no row needs them any more. Each entry is complete by itself, so
        # that an interruption anywhere leaves the states of all positions that were reached.
        self._blocks: dict[int, Tensor] = {}
        # As far as they were asked for: of all tokens, and of a draft vocabulary's.
        self._gumbels: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})
        self._states: dict[int, Tensor] = {}  # before the block of that position was drawn

    def begin(self) -> Self:
        """Go on from the state of the default generator; `end` has to follow, whatever happens in between."""
        with _lock:
            alone = self._device not in _leading
            if self.given is not None:
                self._generator.set_state(self.given.get_state())
            elif alone or self._forecast:
                self._generator.set_state(generator_state(self._device))
            else:
                self._generator.manual_seed(int(torch.randint(2**63 - 1, (), device=self._device)))
            self._states[0] = self._generator.get_state()
            if alone and not self._forecast and self.given is None:
                _leading[self._device] = self
        return self

    @property
    def _leads(self) -> bool:
        return _leading.get(self._device) is self

    def draw_to(self, end: int) -> None:
        """Draw the blocks before `end` that are not drawn yet."""
        while self._drawn < end:
            block = draw_exponential(self._batch_size, self.vocab_size, self._device, self._generator)
            if self._drawn >= self._needed:
                self._blocks[self._drawn] = block
            if self._drawn + 1 >= self._needed:
                self._states[self._drawn + 1] = self._generator.get_state()
            self._drawn += 1

    def exponential(self, row: int, position: int) -> Tensor:
        """E [1, V] of one row at one position."""
        self.draw_to(position + 1)
        return self._blocks[position][row : row + 1]

    def exponentials(self, starts: list[int], depth: int) -> Tensor:
        """E [B, depth, V] of positions starts[b] .. starts[b] + depth - 1.

        A row that has ended lies before what is kept; it gets the oldest blocks, which it does not use.
        """
        self.draw_to(max(starts) + depth)
        return _window(self._blocks, starts, depth)

    def gumbel(self, starts: list[int], depth: int, vocabulary: Tensor | None = None) -> Tensor:
        """-log E [B, depth, V], as `exponentials`, or [B, depth, M] of the draft `vocabulary` [M]: Gumbel noise."""
        self.draw_to(max(starts) + depth)
        known = self._gumbels[vocabulary is not None]
        for position, block in self._blocks.items():
            if position not in known:
                of = block if vocabulary is None else block.index_select(1, vocabulary.to(self._device))
                known[position] = -of.log()
        return _window(known, starts, depth)

    def forget_before(self, position: int) -> None:
        """Drop blocks that no row needs any more, also such as are yet to be drawn."""
        self._needed = max(self._needed, position)
        for kept in (self._blocks, *self._gumbels, self._states):
            for old in [drawn for drawn in kept if drawn < min(position, self._drawn)]:
                del kept[old]

    def leave_as_stock(self, steps: int) -> None:
        """Put the generator where stock `generate` leaves it after `steps` output positions, and end.

        Of a forecast, the tokens have moved it. Should it be broken off, it is to be called again, or `end`.
        """
        if self._leads:
            self.draw_to(steps)
            if steps:  # else it was not moved, unless by others
                set_generator_state(self._device, self._states[steps])
            self.end()
        elif self.given is not None and not self._forecast:
            self.draw_to(steps)
            self.given.set_state(self._states[steps])

    def end(self) -> None:
        """Let the next stream begin at the state of the default generator."""
        with _lock:
            if self._leads:
                del _leading[self._device]


def draw_exponential(rows: int, size: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Draw Exp(1) numbers [rows, size] in float32, as the probabilities of stock are, whatever torch's default is."""
    if device.type == "cpu" and by_uniform():
        return from_uniform(rows, size, generator)
    return torch.empty(rows, size, dtype=torch.float32, device=device).exponential_(1, generator=generator)


def from_uniform(rows: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw Exp(1) numbers [rows, size] on a CPU: the logarithms of many at once, not one by one as torch does."""
    if rows > 1 and rows * size > _IN_CACHE:
        return torch.cat([from_uniform(1, size, generator) for _ in range(rows)])
    uniform = torch.empty(rows, size, dtype=torch.float64, device="cpu").uniform_(generator=generator)
    return uniform.neg_().add_(1).log_().float().abs_()  # of 0 it is 0, not -0


@cache
def by_uniform() -> bool:
    """Tell whether `from_uniform` draws what torch does and leaves the generator alike, tried once per process."""
    ours, torchs = torch.Generator(), torch.Generator()
    drawn = torch.empty(1, 4099, dtype=torch.float32, device="cpu").exponential_(1, generator=torchs)
    return torch.equal(from_uniform(1, 4099, ours), drawn) and torch.equal(ours.get_state(), torchs.get_state())


@contextmanager
def put_back(device: torch.device) -> Iterator[None]:
    """Put the default generator back after code that may draw, if tokens are drawn from it: stock has no such draws."""
    state = generator_state(device)
    try:
        yield
    finally:
        set_generator_state(device, state)


def _window(blocks: dict[int, Tensor], starts: list[int], depth: int) -> Tensor:
    """[B, depth, V] blocks starts[b] .. starts[b] + depth - 1 of row b or, before them, the oldest, of [B, V] each."""
    oldest = next(iter(blocks))
    starts = [max(start, oldest) for start in starts]
    first = min(starts)
    if first == max(starts):
        return torch.stack([blocks[position] for position in range(first, first + depth)], dim=1)
    rows = [blocks[start + ahead][row] for row, start in enumerate(starts) for ahead in range(depth)]
    return torch.stack(rows).view(len(starts), depth, -1)
