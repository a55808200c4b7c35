"""What a tree's nodes cost on a mixture of experts, beside a dense target of as many active weights.

    python examples/experiments/experts.py --json model_cards/experts/experts.json
    python examples/experiments/render.py model_cards/experts/README.md

Layers have the widths of Granite 3.1's 1B-A400M, 512 an expert at a hidden size of 1024, and 8 of 64 experts. Weights
and routers are random, so that the tokens of a tree share experts by chance alone. Drafts cost nothing, and 0 to 6
tokens of each are right. Times are those of the processor; ratios are to the same target without drafts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import date
from typing import Any

import torch
import transformers
from hybrid_costs import AnyDraft
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_dart import TreeConfig, attach
from hf_dart.cli.common import check_file, json_option, positive, set_threads, show, write_json
from hf_dart.drafters.base import Proposal
from hf_dart.hub.machine import hardware, versions
from hf_dart.hub.tables import markdown

STOCK, PACE = "none (stock)", "as pace sizes them"
SIZES = (2, 4, 8, 16, 32)
_DENSE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 8,
          "head_dim": 64, "vocab_size": 4096, "tie_word_embeddings": False, "eos_token_id": None}  # fmt: skip
_SPARSE = {**_DENSE, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
TARGETS = {"8 of 64 experts": ("qwen3_moe", _SPARSE), "dense": ("qwen3", _DENSE)}


class KnownDraft(AnyDraft):
    """Drafts the tokens that `build`'s targets write, of which 0 to 6 are right: 3 on average."""

    _chance = torch.Generator().manual_seed(0)

    def propose(
        self, state: None, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None = None
    ) -> Proposal:
        logits, steps = self._logits[:, :depth], torch.arange(depth or self.draft_length)
        wrong = (steps >= torch.randint(7, (), generator=self._chance)) * (logits.shape[-1] // 2)
        tokens = (next_tokens[:, counts - 1] + 1 + steps + wrong) % logits.shape[-1]
        logits = logits.scatter(2, tokens[..., None], logits.logsumexp(-1, keepdim=True) + 2)
        return Proposal(logits, hidden=logits)


def build(kind: str, fields: dict[str, Any], layers: int) -> Any:
    """A target whose token after t is t + 1, as `simulated.build_target` makes them."""
    torch.manual_seed(0)
    target: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields, num_hidden_layers=layers)).eval()
    with torch.no_grad():
        target.get_input_embeddings().weight.normal_()
        for name, weight in target.named_parameters():
            weight.mul_(1e-2 if "o_proj" in name or "down_proj" in name else 1.0)
        target.lm_head.weight.copy_(target.get_input_embeddings().weight.roll(1, 0))
    return attach(target.requires_grad_(False))


def measured(name: str, layers: int, tokens: int) -> dict[str, Any]:
    """Of stock's rounds, trees of each size and those that pace sizes: cost, nodes, experts of a layer, and speed."""
    model, chosen = build(*TARGETS[name], layers), list[int]()
    for part in model.modules():
        if hasattr(part, "num_experts") and hasattr(part, "top_k"):  # a router, which gives the experts last
            part.register_forward_hook(lambda _, inputs, given: chosen.append(len(given[-1].unique())))
    head = KnownDraft(model.config.vocab_size)
    trees = {STOCK: None, **{str(size): TreeConfig(nodes=size, lookup=0) for size in SIZES}, PACE: TreeConfig(lookup=0)}
    found: dict[str, Any] = {}
    for way, tree in trees.items():
        drafts = {} if tree is None else {"assistant": head, "tree_config": tree}
        for _ in range(2):  # the first call warms up, and pace goes on from its costs
            chosen.clear()
            began = time.process_time()
            text = model.generate(torch.arange(2, 6)[None], do_sample=False, max_new_tokens=tokens, **drafts)
            seconds = time.process_time() - began
        assert text[0, -1] == 5 + tokens
        rounds = tokens if tree is None else head.last_stats.rounds
        found[way] = {
            "round_ms": 1000 * seconds / rounds,
            "nodes": 1.0 if tree is None else 1 + head.last_stats.drafted / rounds,
            "experts": sum(chosen[layers:]) / max(len(chosen) - layers, 1),
            "token_ms": 1000 * seconds / tokens,
        }
    return found


def table(results: dict[str, Any]) -> str:
    """One row per target and way."""
    rows = [
        [target, way, f"{one['nodes']:.1f}", f"{one['experts']:.1f}" if one["experts"] else "",
         f"{one['round_ms'] / found[STOCK]['round_ms']:.2f}", f"{found[STOCK]['token_ms'] / one['token_ms']:.2f}"]
        for target, found in results.items() for way, one in found.items()
    ]  # fmt: skip
    return "\n".join(markdown(["target", "trees", "nodes", "experts of a layer", "cost of a round", "x stock"], rows))


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=positive, default=2, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=positive, default=96, help="default: %(default)s")
    json_option(parser)
    given = parser.parse_args(words)
    check_file(given.json)
    set_threads(1)
    transformers.logging.set_verbosity_error()
    results = {name: measured(name, given.layers, given.new_tokens) for name in TARGETS}
    content = {"date": date.today().isoformat(), "hardware": hardware(torch.device("cpu")), "threads": 1,
               "dtype": "float32", "versions": versions(), "results": results, "markdown": table(results),
               "command": " ".join(["python examples/experiments/experts.py", *words])}  # fmt: skip
    write_json(given.json, content)
    show(content["markdown"])


if __name__ == "__main__":
    main(sys.argv[1:])
