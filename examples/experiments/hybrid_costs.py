"""What rounds cost on targets with running states: random weights of a medium size, on this machine.

    python examples/experiments/hybrid_costs.py --json model_cards/hybrid_costs/costs.json
    python examples/experiments/hybrid_costs.py --json model_cards/hybrid_costs/costs.json --page README.md

Times rounds as `hf-dart profile` does: flat trees of rising size, and chains of as many nodes. With
`--page` nothing is timed: the table of the JSON is written between that page's markers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_dart import LookupDrafter, attach
from hf_dart.bench import profiling
from hf_dart.bench.pair import Pair
from hf_dart.cache.states import states_of
from hf_dart.drafters.base import Proposal
from hf_dart.hub.machine import circumstances
from hf_dart.hub.tables import markdown
from hf_dart.models.stock_steps import CACHE

_WIDTH = 512
_ALL = {
    "vocab_size": 8192,
    "hidden_size": _WIDTH,
    "intermediate_size": 3 * _WIDTH,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "pad_token_id": 0,
    "eos_token_id": None,
}
_MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64}
_LINEAR = {
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_5_text": _LINEAR,
    "lfm2": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 2},
    "bamba": {**_MAMBA, "attn_layer_indices": [3, 7]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 1024},
}
MARKERS = "<!-- costs -->", "<!-- /costs -->"


class AnyDraft(LookupDrafter):
    """Drafts without a draft's cost."""

    draft_length = 8

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self._logits = torch.randn(1, self.draft_length, vocabulary, generator=torch.Generator().manual_seed(0))

    def propose(
        self, state: None, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None = None
    ) -> Proposal:
        logits = self._logits[:, :depth]
        return Proposal(logits, hidden=logits)


def target(name: str) -> Any:
    """A random target in float32."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**_ALL, **TARGETS[name])).eval()


def measured(name: str, rounds: int, repeats: int) -> dict[str, Any]:
    """What `hf-dart profile` finds for one target, and how many bytes its states take per row, or per node."""
    model = attach(target(name))
    pair = Pair(model, AnyDraft(_ALL["vocab_size"]), None, name, "any draft")
    found = profiling.measure(pair, context=64, rounds=rounds, repeats=repeats, sizes=SIZES)
    outputs = model(torch.arange(2, 6)[None], use_cache=True)
    states = states_of(outputs[CACHE]).values()
    return {
        "weights": sum(weight.numel() for weight in model.parameters()),
        "state_bytes": sum(state.numel() * state.element_size() for state in states),
        "token_ms": found.token_ms,
        "plain_ms": found.plain_ms,
        **found.tree,
    }


SIZES = (1, 2, 4, 8, 16, 32)


def table(found: dict[str, Any]) -> list[str]:
    """The lines of the table."""
    rows = []
    for name, its in found["targets"].items():
        costs = [f"{cost:.2f}" for _, cost in its["verify_costs"]]
        level = "-" if its.get("level_cost") is None else f"{its['level_cost']:.2f}"
        rows.append([name, f"{its['weights'] / 1e6:.0f} M", f"{its['state_bytes'] / 1e6:.2f} MB", level, *costs])
    sizes = [f"{size:g} nodes" for size, _ in next(iter(found["targets"].values()))["verify_costs"]]
    return markdown(["target", "weights", "states of a row or node", "a level", *sizes], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--page", help="of the JSON's folder; its table is written again")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    if asked.page:
        page = asked.json.with_name(asked.page)
        before, rest = page.read_text().split(MARKERS[0])
        found = json.loads(asked.json.read_text())
        page.write_text("\n".join([before + MARKERS[0], *table(found), MARKERS[1] + rest.split(MARKERS[1])[1]]))
        return
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    targets = {name: measured(name, asked.rounds, asked.repeats) for name in TARGETS}
    about = {**circumstances(["python", *sys.argv], torch.device("cpu")), "dtype": "float32"}
    asked.json.write_text(json.dumps({**about, "targets": targets}, indent=1) + "\n")
    print("\n".join(table(json.loads(asked.json.read_text()))))


if __name__ == "__main__":
    main()
