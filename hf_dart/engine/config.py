"""`EngineConfig`: how rounds are compiled and captured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """How rounds are compiled and captured.

    Args:
        backend: of `torch.compile`; None compiles nothing, which starts at once. On a GPU the round is one CUDA graph
            either way.
        mode: of `torch.compile`: "max-autotune-no-cudagraphs" times several kernels for each matrix product and takes
            the fastest, which takes minutes.
        first_tier: T of the shortest tier, in tokens; each is twice as long as the one before.
        share: how many times its share of a batch's nodes one row may have. The likeliest nodes of all rows are
            verified, and none of rows that have ended (`hf_dart.engine.budget`); 1 gives each row its own, as is done
            for targets that do not attend by SDPA.
        lag: rounds that run ahead of what the host has read; None is 1 on a GPU, and 0 on a CPU, where nothing runs
            meanwhile.

    Raises:
        ValueError: a field is out of range.
    """

    backend: str | None = "inductor"
    mode: str | None = None
    first_tier: int = 512
    share: int = 2
    lag: int | None = None

    def __post_init__(self) -> None:
        if self.mode is not None and self.backend != "inductor":
            raise ValueError(f"mode is {self.mode!r}, which only the backend inductor has; leave one of them out.")
        if self.mode in ("reduce-overhead", "max-autotune"):
            raise ValueError(f"mode is {self.mode!r}, which makes graphs of its own; give max-autotune-no-cudagraphs.")
        if self.first_tier < 8 or self.first_tier % 8:
            raise ValueError(f"first_tier is {self.first_tier}; give a multiple of 8 tokens.")
        if self.share < 1:
            raise ValueError(f"share is {self.share}; give 1 or more.")
        if self.lag not in (None, 0, 1, 2):
            raise ValueError(f"lag is {self.lag}; give 0, 1 or 2 rounds, or leave it out.")
