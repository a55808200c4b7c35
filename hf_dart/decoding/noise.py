"""The noise stream: what `torch.multinomial` would draw, position by position, ahead of time.

`torch.multinomial(p, 1)` returns `argmax(p / E)` with E ~ Exp(1) of p's shape drawn from the default
generator. Stock sampling draws one [B, V] block per output position, so block t belongs to position t
whatever order positions are decided in: a tree node of depth k below position t takes its token with block
t + k, and the drafter may look at the same blocks (Gumbel-max coupling of drafter and target).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from hf_dart.models.devices import generator_state, set_generator_state

MAX_LEAD = 32
"""No row runs further ahead of the slowest unfinished row: a position costs B * V floats."""

# By device, the stream that will advance its default generator. Streams that run meanwhile, in other threads,
# must not draw the same noise, nor put it back.
_leading: WeakValueDictionary[torch.device, NoiseStream] = WeakValueDictionary()
_lock = Lock()


class NoiseStream:
    """Blocks of Exp(1) noise [B, V] by output position, from a copy of the default generator.

    The default generator itself is moved once, by `leave_as_stock`. While another stream is alive on the device, the
    two calls run side by side: then nobody can say what stock would have drawn in either, and this one draws from a
    generator of its own, which a number from the default one seeds.

    Args:
        vocab_size: V; 0 if that is not known yet, and `vocab_size` is set before anything is drawn.
        forecast: tokens will be drawn from the default generator itself, as they come; this stream leaves it alone.
        generator: whose numbers it draws and moves in the place of the default generator's; None for that one.
    """

    def __init__(
        self,
        batch_size: int,
        vocab_size: int,
        device: torch.device,
        *,
        forecast: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        self._batch_size, self.vocab_size = batch_size, vocab_size
        self._device = device
        self._generator = torch.Generator(device)
        self._forecast, self._given = forecast, generator
        self._drawn = 0  # positions
        self._needed = 0  # the oldest position that a row still needs
        # By position; the oldest are dropped when no row needs them any more. Each entry is complete by itself, so
        # that an interruption anywhere leaves the states of all positions that were reached.
        self._blocks: dict[int, Tensor] = {}
        self._gumbels: dict[int, Tensor] = {}  # as far as they were asked for
        self._states: dict[int, Tensor] = {}  # before the block of that position was drawn

    def begin(self) -> Self:
        """Go on from the state of the default generator; `end` has to follow, whatever happens in between."""
        with _lock:
            alone = self._device not in _leading
            if self._given is not None:
                self._generator.set_state(self._given.get_state())
            elif alone or self._forecast:
                self._generator.set_state(generator_state(self._device))
            else:
                self._generator.manual_seed(int(torch.randint(2**63 - 1, (), device=self._device)))
            self._states[0] = self._generator.get_state()
            if alone and not self._forecast and self._given is None:
                _leading[self._device] = self
        return self

    @property
    def _leads(self) -> bool:
        return _leading.get(self._device) is self

    def _draw_to(self, end: int) -> None:
        """Draw the blocks before `end` that are not drawn yet."""
        while self._drawn < end:
            # As float32 as the probabilities of stock, whatever torch's default is.
            block = torch.empty(self._batch_size, self.vocab_size, dtype=torch.float32, device=self._device)
            block.exponential_(1, generator=self._generator)
            if self._drawn >= self._needed:
                self._blocks[self._drawn] = block
            if self._drawn + 1 >= self._needed:
                self._states[self._drawn + 1] = self._generator.get_state()
            self._drawn += 1

    def exponential(self, row: int, position: int) -> Tensor:
        """E [1, V] of one row at one position."""
        self._draw_to(position + 1)
        return self._blocks[position][row : row + 1]

    def exponentials(self, starts: list[int], depth: int) -> Tensor:
        """E [B, depth, V] of positions starts[b] .. starts[b] + depth - 1.

        A row that has ended lies before what is kept; it gets the oldest blocks, which it does not use.
        """
        self._draw_to(max(starts) + depth)
        oldest = next(iter(self._blocks))
        starts = [max(start, oldest) for start in starts]
        if depth == 1:  # no block is copied as a whole
            return torch.stack([self._blocks[start][row] for row, start in enumerate(starts)])[:, None]
        return _window(self._blocks, starts, depth)

    def gumbel(self, starts: list[int], depth: int) -> Tensor:
        """-log E [B, depth, V], as `exponentials`: standard Gumbel noise."""
        self._draw_to(max(starts) + depth)
        for position, block in self._blocks.items():
            if position not in self._gumbels:
                self._gumbels[position] = -block.log()
        oldest = next(iter(self._blocks))
        return _window(self._gumbels, [max(start, oldest) for start in starts], depth)

    def forget_before(self, position: int) -> None:
        """Drop blocks that no row needs any more, also such as are yet to be drawn."""
        self._needed = max(self._needed, position)
        for kept in (self._blocks, self._gumbels, self._states):
            for old in [drawn for drawn in kept if drawn < min(position, self._drawn)]:
                del kept[old]

    def leave_as_stock(self, steps: int) -> None:
        """Put the generator where stock `generate` leaves it after `steps` output positions, and end.

        Should it be broken off, it is to be called again, or `end`.
        """
        if self._leads:
            self._draw_to(steps)
            if steps:  # else it was not moved, unless by others
                set_generator_state(self._device, self._states[steps])
            self.end()
        elif self._given is not None:
            self._draw_to(steps)
            self._given.set_state(self._states[steps])

    def end(self) -> None:
        """Let the next stream begin at the state of the default generator."""
        with _lock:
            if self._leads:
                del _leading[self._device]


@contextmanager
def put_back(device: torch.device) -> Iterator[None]:
    """Put the default generator back after code that may draw, if tokens are drawn from it: stock has no such draws."""
    state = generator_state(device)
    try:
        yield
    finally:
        set_generator_state(device, state)


def _window(blocks: dict[int, Tensor], starts: list[int], depth: int) -> Tensor:
    """[B, depth, V] blocks starts[b] .. starts[b] + depth - 1 of row b, each block being [B, V]."""
    first, last = min(starts), max(starts)
    together = torch.stack([blocks[position] for position in range(first, last + depth)], dim=1)
    if first == last:
        return together
    device = together.device
    places = torch.tensor(starts, device=device)[:, None] - first + torch.arange(depth, device=device)
    return together[torch.arange(len(starts), device=device)[:, None], places]
