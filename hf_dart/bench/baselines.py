"""Methods that a bench compares with stock `generate`: stock's own ways to be faster, and drafters of ours."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from transformers import CompileConfig

from hf_dart.bench.pair import Pair, shown_name
from hf_dart.drafters.lookup import LookupDrafter
from hf_dart.engine.engine import compile
from hf_dart.errors import UserError
from hf_dart.hub.tables import OURS, STOCK
from hf_dart.trees.config import TreeConfig

STOCK_COMPILED, LOOKUP, ASSISTED = "stock, compiled", "stock prompt lookup", "stock assisted"
ENGINE = f"{OURS}, compiled"
COMPILED = (STOCK_COMPILED, ENGINE)
_LOOKUP_TOKENS = 10


def methods(
    pair: Pair,
    names: Sequence[str] = ("lookup", "tree"),
    assistant_model: Any = None,
    drafters: dict[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Options of `generate` by method, stock's own first.

    Args:
        names: "compiled" (stock's static cache and `torch.compile`), "lookup" (stock's prompt lookup, left out for
            targets with running states, for which stock has none), "copies" (our `LookupDrafter`), "chain", "tree", the
            head as it comes, and "engine", the same in compiled rounds.
        assistant_model: a small causal LM for stock's assisted decoding.
        drafters: more drafters of ours for the target by their paths, each with its own tree.
    """
    head = pair.head
    found: dict[str, dict[str, Any]] = {STOCK: {}}
    if "compiled" in names:
        compiling = CompileConfig()
        if pair.model.device.type == "cpu":
            compiling._compile_all_devices = True  # stock compiles on accelerators only, unless told so
        found[STOCK_COMPILED] = {"cache_implementation": "static", "compile_config": compiling}
    if pair.model._is_stateful and assistant_model is not None:
        raise UserError("Stock drafts for no target with running states; leave --assistant-model out.")
    if "lookup" in names and not pair.model._is_stateful:
        found[LOOKUP] = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}
    if assistant_model is not None:
        found[ASSISTED] = {"assistant_model": assistant_model}
    if "copies" in names:
        found[f"{OURS}, copies alone"] = {"assistant": LookupDrafter()}
    if "chain" in names and head.draft_length:  # copied text has no chain of its own
        chain = TreeConfig.chain(head.tree_config.depth or head.draft_length)
        found[f"{OURS}, chain"] = {"assistant": head, "tree_config": chain}
    if "tree" in names:
        found[OURS] = {"assistant": head}
    if "engine" in names:
        captured = copy.deepcopy(head)
        compile(pair.model, captured)
        found[ENGINE] = {"assistant": captured}
    for path, drafter in (drafters or {}).items():
        name = f"{OURS}, {shown_name(path)}"
        found[f"{OURS}, {path}" if name in found else name] = {"assistant": drafter}
    return found


def takes(options: dict[str, Any], batch: int, mode: dict[str, Any]) -> bool:
    """Return True if a method is measured: stock's assisted decoding takes one row, its lookup greedy text alone."""
    if "prompt_lookup_num_tokens" in options:
        return batch == 1 and not mode["do_sample"]
    return batch == 1 or "assistant_model" not in options


def parameters(pair: Pair, methods: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Count the parameters that each method adds to the target's."""
    models = {name: options.get("assistant", options.get("assistant_model")) for name, options in methods.items()}
    found = {name: pair.added_parameters(model) for name, model in models.items() if model is not None}
    return {name: count for name, count in found.items() if count}
