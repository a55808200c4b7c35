"""What rounds compute by, in the place of what the target's own code would launch."""

from __future__ import annotations

from typing import Any, NamedTuple

from hf_dart.target.fused import FusedLinears


class Kernels(NamedTuple):
    """Of one target, as `EngineConfig` asks for them; none of them is used before the engine's trial has passed.

    Attributes:
        linears: products that are computed at once.
        heads: forwards of attentions, of `hf_dart.engine.heads`.
        tree_attention: attend by `hf_dart.engine.tree_attention`.
    """

    linears: tuple[FusedLinears, ...] = ()
    heads: tuple[Any, ...] = ()
    tree_attention: bool = False
