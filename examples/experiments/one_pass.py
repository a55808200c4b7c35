"""A DFlash drafter's one pass here and in the original code, on the same weights.

    pip install --no-deps --target original dflash==0.1.0
    python examples/experiments/one_pass.py original --shape qwen3-0.6b

Each round hands both what was verified and takes logits of a block, the target's embeddings and LM head included, as
`dflash_generate` and `Drafter.propose` do. They take turns over the same text; times are those of the processor, so
that other work on the machine counts little. Weights are random: read times, and that the logits are the same.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median
from time import thread_time
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_dart.cli.common import say
from hf_dart.drafters.dflash.drafter import DFlashConfig, DFlashDrafter
from hf_dart.models.forwards import standing_in
from hf_dart.models.packed_weights import pack, packed_drafts

BLOCK, LAYERS = 16, 5
SHAPES = {  # hidden and intermediate size, heads, those of keys, tokens
    "small": (256, 768, 4, 2, 6144),
    "qwen3-0.6b": (1024, 3072, 16, 8, 32768),
    "qwen3-4b": (2560, 9728, 32, 8, 151936),
}


def published(shape: str) -> dict[str, Any]:
    """A config.json as z-lab's, of a target with six layers."""
    hidden, intermediate, heads, key_heads, tokens = SHAPES[shape]
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": BLOCK, "hidden_size": hidden,
        "dflash_config": {"mask_token_id": tokens - 1, "target_layer_ids": list(range(LAYERS))}, "dtype": "float32",
        "intermediate_size": intermediate, "num_attention_heads": heads, "num_key_value_heads": key_heads,
        "head_dim": 64 if shape == "small" else 128, "num_hidden_layers": LAYERS, "num_target_layers": LAYERS + 1,
        "vocab_size": tokens, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "attention_bias": False, "layer_types": ["full_attention"] * LAYERS, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip


@torch.no_grad()
def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("original", help="folder with the package dflash")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--text", type=int, default=256, help="tokens before the first block")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--accepted", type=int, default=4, help="tokens that each round verifies")
    parser.add_argument("--plain", action="store_true", help="leave weights as they are, which calls on a CPU pack")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sys.path.append(args.original)
    from dflash.model import DFlashDraftModel, _crop_to
    from transformers import DynamicCache

    content = published(args.shape)
    config = Qwen3Config(**{**content, "intermediate_size": 8, "num_hidden_layers": LAYERS + 1, "layer_types": None})
    target = Qwen3ForCausalLM(config).eval()
    theirs = DFlashDraftModel(Qwen3Config(**content, attn_implementation="sdpa")).eval()
    ours = DFlashDrafter(DFlashConfig.of(content)).eval()
    ours.load_state_dict(theirs.state_dict())
    ours.bind(target)
    if not args.plain:
        pack(target, ours)
    packed = packed_drafts(target, ours)
    memory, state, start = DynamicCache(), ours.begin(1, args.text + BLOCK), 0
    positions = torch.arange(args.text + args.rounds * args.accepted + BLOCK)[None]

    def original(features: Tensor, tokens: Tensor) -> Tensor:
        entries = tokens.new_full((1, BLOCK), content["dflash_config"]["mask_token_id"])
        entries[:, 0] = tokens[:, -1]
        end = start + tokens.shape[1]
        hidden = theirs(
            target_hidden=features,
            noise_embedding=target.model.embed_tokens(entries),
            position_ids=positions[:, start : end + BLOCK],
            past_key_values=memory,
            use_cache=True,
        )[:, 1 - BLOCK :]
        _crop_to(memory, end)
        return theirs.compute_logits(hidden, target.lm_head)

    def here(features: Tensor, tokens: Tensor) -> Tensor:
        with standing_in(packed):
            return ours.propose(state, features, tokens, torch.tensor([tokens.shape[1]])).logits

    times: dict[Any, list[float]] = {original: [], here: []}
    for number in range(args.rounds + 1):
        read = args.accepted if number else args.text
        features, tokens = (
            torch.randn(1, read, LAYERS * config.hidden_size),
            torch.randint(config.vocab_size, (1, read)),
        )
        logits = {}
        for run in (original, here) if number % 2 else (here, original):
            began = thread_time()
            logits[run] = run(features, tokens)
            times[run].append(1000 * (thread_time() - began))
        torch.testing.assert_close(logits[here], logits[original], rtol=1e-4, atol=1e-4)
        start += read
    took = {run.__name__: median(times[run][1:]) for run in times}
    least = {run.__name__: min(times[run][1:]) for run in times}
    ratio = median(a / b for a, b in zip(times[here][1:], times[original][1:], strict=True))
    say(f"{args.shape}, {args.rounds} rounds of {args.accepted} tokens: milliseconds, median and least")
    for name, value in took.items():
        say(f"  {name}: {value:.2f}, {least[name]:.2f}")
    say(f"  here / original, median of pairs: {ratio:.3f}")


if __name__ == "__main__":
    main()
