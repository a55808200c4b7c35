"""What rounds compute by, in the place of what the target's own code would launch."""

from __future__ import annotations

from typing import Any, NamedTuple

from hf_dart.target.fused import FusedLinears


class Kernels(NamedTuple):
    """Of one target, as `EngineConfig` asks for them; none of them is used before the engine's trial has passed.

    Attributes:
        linears: products that are computed at once.
        heads: forwards of attentions, of `hf_dart.engine.heads`.
        layers: forwards of decoder layers, of `hf_dart.engine.layers`.
        tree_attention: "triton" attends by `hf_dart.engine.tree_attention`, "flex" by `hf_dart.engine.flex_attention`;
            None by SDPA.
    """

    linears: tuple[FusedLinears, ...] = ()
    heads: tuple[Any, ...] = ()
    layers: tuple[Any, ...] = ()
    tree_attention: str | None = None
