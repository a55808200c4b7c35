"""A round on a Qwen3-Next of a medium size, its gated delta rules level by level and at once, on this machine.

    python examples/experiments/tree_forms.py --json model_cards/hybrid_costs/forms.json
    python examples/experiments/tree_forms.py --json model_cards/hybrid_costs/forms.json --page README.md

A round is the forward over a tree of random tokens, and the commit of three nodes. With `--page` nothing is timed: the
table of the JSON is written between that page's markers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3NextConfig

from hf_dart.cache.target_cache import TargetCache
from hf_dart.hub.machine import circumstances
from hf_dart.hub.tables import markdown
from hf_dart.models.running_states.tree_forward import Mixer
from hf_dart.models.stock_steps import StockSteps
from hf_dart.models.verify import Verifier, layer_windows, mask_kinds
from hf_dart.trees.tree import DraftTree

SIZES, DEPTH, PROMPT = (8, 16, 32), 5, 128
MARKERS = "<!-- forms -->", "<!-- /forms -->"
CONFIG: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "mlp_only_layers": list(range(8)),
}


class _Calls(TorchDispatchMode):
    """Counts operations of torch: on an accelerator, about the kernels that are launched."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def drawn_tree(nodes: int) -> DraftTree:
    """A path of five nodes below the root, and random branches."""
    random, parents, depths = Random(nodes), [*range(-1, DEPTH)], [*range(DEPTH + 1)]
    while len(parents) < nodes:
        parents.append(random.choice([node for node, depth in enumerate(depths) if depth < DEPTH]))
        depths.append(depths[parents[-1]] + 1)
    tokens = torch.randint(CONFIG["vocab_size"], (1, nodes))
    return DraftTree.from_parents(tokens, torch.tensor([parents]))


@torch.no_grad()
def measured(rounds: int) -> dict[str, Any]:
    """Per size: median milliseconds and operations of a round, both ways, which take turns."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3NextConfig(**CONFIG)).eval()
    cache = DynamicCache(config=model.config)
    StockSteps(model, torch.randint(CONFIG["vocab_size"], (1, PROMPT)), [0], cache).prefill()
    trees = TargetCache(cache, [0], 4 * PROMPT, keep=True, windows=layer_windows(model, cache))
    verify = Verifier(model, trees, mask_kinds(model, cache), [])
    assert all(mixer.family is not None for mixer in verify.mixers)
    ways = {"once": verify.mixers, "levels": [Mixer(mixer.module, mixer.slots) for mixer in verify.mixers]}

    def one_round(way: str, tree: DraftTree) -> None:
        verify.mixers = ways[way]
        verify(tree)
        accepted = min(tree.size, 3)
        trees.commit(torch.arange(accepted)[None], [accepted])
        trees.truncate(trees.prompt_lengths)

    found: dict[str, Any] = {}
    for nodes in (1, *SIZES):
        tree = drawn_tree(nodes) if nodes > 1 else DraftTree.chain(torch.tensor([[5]]))
        times: dict[str, list[float]] = {way: [] for way in ways}
        calls = {}
        for number in range(rounds + 2):
            for way in ways:
                start = perf_counter()
                one_round(way, tree)
                if number > 1:
                    times[way].append(1000 * (perf_counter() - start))
        for way in ways:
            with _Calls() as counted:
                one_round(way, tree)
            calls[way] = counted.count
        found[str(nodes)] = {way: {"ms": round(median(times[way]), 1), "calls": calls[way]} for way in ways}
    return found


def table(found: dict[str, Any]) -> list[str]:
    """The lines of the table."""
    rows = []
    for nodes, its in found["rounds"].items():
        levels, once = its["levels"], its["once"]
        times = f"{levels['ms']:.0f} ms", f"{once['ms']:.0f} ms", f"{levels['ms'] / once['ms']:.2f}"
        rows.append([nodes, *times, f"{levels['calls']}", f"{once['calls']}"])
    names = ["nodes", "by levels", "at once", "ratio", "operations by levels", "operations at once"]
    return markdown(names, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--page", help="of the JSON's folder; its table is written again")
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    if asked.page:
        page = asked.json.with_name(asked.page)
        before, rest = page.read_text().split(MARKERS[0])
        lines = table(json.loads(asked.json.read_text()))
        page.write_text("\n".join([before + MARKERS[0], *lines, MARKERS[1] + rest.split(MARKERS[1])[1]]))
        return
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = {**circumstances(["python", *sys.argv], torch.device("cpu")), "dtype": "float32"}
    found["rounds"] = measured(asked.rounds)
    asked.json.parent.mkdir(exist_ok=True)
    asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
