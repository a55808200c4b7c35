"""The noise stream: what `torch.multinomial` would draw, position by position, ahead of time.

`torch.multinomial(p, 1)` returns `argmax(p / E)` with E ~ Exp(1) of p's shape drawn from the default
generator. Stock sampling draws one [B, V] block per output position, so block t belongs to position t
whatever order positions are decided in: a tree node of depth k below position t takes its token with block
t + k, and the drafter may look at the same blocks (Gumbel-max coupling of drafter and target).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LEAD = 32
"""No row runs further ahead of the slowest unfinished row: a position costs B * V floats."""


class NoiseStream:
    """Blocks of Exp(1) noise [B, V] by output position, from a copy of the default generator.

    The default generator itself is moved once, by `leave_as_stock`.
    """

    def __init__(self, batch_size: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (batch_size, vocab_size)
        self._device = device
        self._generator = torch.Generator(device)
        self._generator.set_state(_default_state(device))
        self._first = 0  # position of the oldest block kept
        self._blocks: list[Tensor] = []
        self._gumbels: list[Tensor] = []  # as far as they were asked for
        # _states[i] is the generator's state before block _first + i was drawn.
        self._states = [self._generator.get_state()]

    def _draw_to(self, end: int) -> None:
        while self._first + len(self._blocks) < end:
            block = torch.empty(self._shape, device=self._device).exponential_(1, generator=self._generator)
            self._blocks.append(block)
            self._states.append(self._generator.get_state())

    def exponential(self, row: int, position: int) -> Tensor:
        """E [1, V] of one row at one position."""
        self._draw_to(position + 1)
        return self._blocks[position - self._first][row : row + 1]

    def exponentials(self, starts: list[int], depth: int) -> Tensor:
        """E [B, depth, V] of positions starts[b] .. starts[b] + depth - 1.

        A row that has ended lies behind what is kept; it gets the oldest blocks, which it does not use.
        """
        self._draw_to(max(starts) + depth)
        return _window(self._blocks, [max(start - self._first, 0) for start in starts], depth)

    def gumbel(self, starts: list[int], depth: int) -> Tensor:
        """-log E [B, depth, V], as `exponentials`: standard Gumbel noise."""
        self._draw_to(max(starts) + depth)
        for i in range(len(self._gumbels), len(self._blocks)):
            self._gumbels.append(-self._blocks[i].log())
        return _window(self._gumbels, [max(start - self._first, 0) for start in starts], depth)

    def forget_before(self, position: int) -> None:
        """Drop blocks that no row needs any more."""
        gone = min(position - self._first, len(self._blocks))
        if gone > 0:
            del self._blocks[:gone], self._gumbels[:gone], self._states[:gone]
            self._first += gone

    def leave_as_stock(self, steps: int) -> None:
        """Put the default generator where stock `generate` leaves it after `steps` output positions."""
        self._draw_to(steps)
        _set_default_state(self._device, self._states[steps - self._first])


def _window(blocks: list[Tensor], starts: list[int], depth: int) -> Tensor:
    """[B, depth, V] blocks starts[b] .. starts[b] + depth - 1 of row b, each block being [B, V]."""
    first, last = min(starts), max(starts)
    together = torch.stack(blocks[first : last + depth], dim=1)
    if first == last:
        return together
    device = together.device
    places = torch.tensor(starts, device=device)[:, None] - first + torch.arange(depth, device=device)
    return together[torch.arange(len(starts), device=device)[:, None], places]


def _default_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_default_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
