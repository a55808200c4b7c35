"""One call of `generate` drawn from a seed: target, prompt, every option and argument, drafter, tree, cache, turns."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import torch
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

from hf_dart import LanguageModelDrafter, LookupDrafter, TreeConfig, attach
from hf_dart.drafters.base import Proposal
from support.tiny import (
    PAD,
    VOCABULARY,
    ReplayDrafter,
    tiny_diffusion_drafter,
    tiny_eagle_drafter,
    tiny_head,
    tiny_target,
)

_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
_TRAINED = {"original_max_position_embeddings": 32}
_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [2.0, 3.0, 4.0, 6.0]}
_LONG = {"rope_type": "longrope", "rope_theta": 1e4, **_FACTORS}
# Every kind of mask, cache layer, position and attention; some whose position table ends early.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("llama", "qwen3", "gemma3", "mistral", "phi3", "gpt_neox", "mixtral", "cohere2")},
    **{name: (name, {}) for name in ("gemma2", "gptj", "deepseek_v3", "llama4", "gemma4_shared")},
    "gpt2": ("gpt2", {"n_positions": 40}),
    "opt": ("opt", {"max_position_embeddings": 40}),
    "llama, dynamic rope": ("llama", {"max_position_embeddings": 32, "rope_parameters": _DYNAMIC}),
    "phi3, longrope": ("phi3", {"sliding_window": None, **_TRAINED, "rope_parameters": {**_LONG, **_TRAINED}}),
}
EAGER_ONLY = {"gemma2", "gptj"}
# They weigh experts, or turn positions, in fp32 whatever their dtype.
FP32 = {"mixtral", "deepseek_v3", "llama4", "gptj"}
SLOW = {"deepseek_v3", "llama4", "gemma4_shared"}  # experts in loops, many layers

HEADS: dict[str, dict[str, Any]] = {
    "head": {},
    "head of two layers": {"num_layers": 2, "feature_layers": [0, 2]},
    "head of one token": {"draft_length": 1},
    "head of 31 tokens": {"draft_length": 31, "feature_layers": [2], "num_layers": 2},
    "bidirectional head": {"block_attention": "bidirectional", "num_layers": 2},
    "head of two final norms": {"double_norm": True},
    "head that shifts nothing": {"shift_logits": False},
    "stream head": {"input_form": "stream"},
    "peagle head": {"mask_mode": "peagle", "mask_token_id": VOCABULARY - 1},
    "selector": {"selector_rank": 4},
    "markov selector": {"selector_rank": 4, "selector_kind": "markov"},
    "editor": {"editor": True},
    "draft vocabulary": {"draft_vocabulary": range(2, 40)},
}
OTHERS = ["lookup", "diffusion", "eagle", "language model"]
DRAFTERS = [*HEADS, *OTHERS, *["replay"] * 60, *["hostile"] * 3]

# ---- what users put into GenerationConfig: how often, and which values -----------------------------------

_TOKEN_LISTS = [[3], [5, 9, 14], [2, 8, 20, 21, 33, 40]]
_WATERMARKS = [
    WatermarkingConfig(bias=1.5, seeding_scheme="lefthash"), WatermarkingConfig(greenlist_ratio=0.4),
    SynthIDTextWatermarkingConfig(keys=[3, 5, 7, 11], ngram_len=3), {"greenlist_ratio": 0.3},
]  # fmt: skip
# They change nothing.
_OF_OTHER_WAYS = {
    "length_penalty": 0.5, "early_stopping": True, "low_memory": True, "decoder_start_token_id": 1,
    "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 4, "target_lookbehind": 4, "assistant_ensemble_weight": 0.5, "max_matching_ngram_size": 2,
}  # fmt: skip
SAMPLING: dict[str, tuple[float, list[Any]]] = {
    "top_k": (1.0, [0, 0, 1, 5, 40, VOCABULARY, 500]),
    "temperature": (0.3, [0.2, 0.7, 1.6, 5.0]),
    "top_p": (0.3, [1e-3, 0.3, 0.5, 0.9, 1.0]),
    "min_p": (0.15, [0.0, 0.02, 0.3]),
    "typical_p": (0.12, [0.2, 0.8, 1.0]),
    "epsilon_cutoff": (0.12, [1e-4, 0.02, 0.3]),
    "eta_cutoff": (0.12, [1e-4, 0.02, 0.3]),
    "top_h": (0.12, [0.2, 0.5, 1.0]),
    "num_return_sequences": (0.15, [1, 2, 3]),
}
FIELDS: dict[str, tuple[float, list[Any]]] = {
    "repetition_penalty": (0.2, [0.7, 1.0, 1.3, 3.0]),
    "encoder_repetition_penalty": (0.08, [0.7, 1.4]),
    "no_repeat_ngram_size": (0.15, [0, 1, 2, 3]),
    "encoder_no_repeat_ngram_size": (0.08, [1, 2]),
    "bad_words_ids": (0.15, [[[3]], [[4, 5], [6, 7, 8]], [[11], [12, 30]]]),
    "suppress_tokens": (0.12, _TOKEN_LISTS),
    "begin_suppress_tokens": (0.12, _TOKEN_LISTS),
    "sequence_bias": (0.12, [{(5,): 2.0, (7, 9): -3.0}, [[[5], 2.0], [[7, 9, 11], 30.0]], {(3,): -100.0}]),
    "forced_eos_token_id": (0.1, [3, [3, 4]]),
    "forced_bos_token_id": (0.06, [9]),
    "renormalize_logits": (0.12, [True]),
    "remove_invalid_values": (0.12, [True]),
    "guidance_scale": (0.06, [1.0, 1.5, 2.5]),
    "watermarking_config": (0.1, _WATERMARKS),
    "eos_token_id": (0.5, [3, [7, 19, 31], [5, 6, 12, 23, 30, 41]]),
    "exponential_decay_length_penalty": (0.06, [(0, 1.5), (6, 1.1)]),
    "max_length": (0.15, [18, 22, 30, 41]),
    "max_new_tokens": (0.9, [1, 2, 6, *[13] * 4, *[18] * 4, 24]),
    "min_new_tokens": (0.2, [1, 4, 9, 30]),
    "min_length": (0.1, [5, 15, 25]),
    "pad_token_id": (0.9, [PAD, PAD, 7, VOCABULARY - 1]),
    "bos_token_id": (0.1, [1, 4]),
    "max_time": (0.06, [3.5, 9.5, 100.0]),
    "stop_strings": (0.1, ["q", ["xy", "aB", "q", "Tz"], ["b", "c", "d"]]),
    "return_dict_in_generate": (0.45, [True]),
    "output_scores": (0.15, [True]),
    "output_logits": (0.12, [True]),
    "output_hidden_states": (0.1, [True]),
    "prefill_chunk_size": (0.2, [1, 2, 3, 7, 64]),
    "cache_implementation": (0.12, ["static", "static", "dynamic", "hybrid"]),
    "max_cache_len": (0.05, [30, 128]),
    "disable_compile": (0.06, [True]),
    "use_cache": (0.05, [True]),
    **{name: (0.03, [value]) for name, value in _OF_OTHER_WAYS.items()},
}
# What stock refuses, or ours: one of them in a call.
ODD: list[tuple[str, Any]] = [
    ("num_beams", 2), ("use_cache", False), ("output_attentions", True), ("token_healing", True), ("use_mtp", True),
    ("cache_implementation", "quantized"), ("cache_implementation", "offloaded"),
    ("cache_implementation", "offloaded_static"), ("cache_implementation", "nonsense"), ("cache_config", {"nbits": 4}),
    ("prompt_lookup_num_tokens", 3), ("penalty_alpha", 0.6), ("dola_layers", "low"), ("num_beam_groups", 2),
    ("diversity_penalty", 0.5),
    ("constraints", []), ("force_words_ids", [[3]]), ("assistant_early_exit", 1), ("is_assistant", True),
    ("speculation_type", "nonsense"), ("temperature", 0.0), ("temperature", 2), ("temperature", "hot"), ("top_k", -3),
    ("top_p", 1.5), ("min_p", 2.0), ("typical_p", 3.0), ("epsilon_cutoff", 2.0), ("eta_cutoff", -1.0), ("top_h", 3.0),
    ("repetition_penalty", 0.0), ("no_repeat_ngram_size", -2), ("encoder_no_repeat_ngram_size", -1),
    ("bad_words_ids", [[]]), ("bad_words_ids", [3]), ("bad_words_ids", [[VOCABULARY + 4]]), ("sequence_bias", {}),
    ("sequence_bias", {(VOCABULARY + 3,): 1.0}), ("suppress_tokens", [VOCABULARY + 9]), ("suppress_tokens", []),
    ("max_new_tokens", 0), ("max_new_tokens", -3), ("max_new_tokens", 9.0), ("max_length", 2), ("min_new_tokens", -2),
    ("eos_token_id", VOCABULARY + 5), ("eos_token_id", []), ("eos_token_id", -1), ("pad_token_id", -1),
    ("num_return_sequences", 0), ("num_return_sequences", 2), ("stop_strings", []), ("stop_strings", [""]),
    ("exponential_decay_length_penalty", (3, 1.1)), ("forced_eos_token_id", VOCABULARY + 2),
    ("forced_bos_token_id", VOCABULARY + 2), ("prefill_chunk_size", 0), ("prefill_chunk_size", -1),
    ("guidance_scale", 0.0), ("max_time", 0.0), ("max_time", -1.0), ("do_sample", None), ("not_an_option", 3),
    ("output_hidden_states", [0]),
]  # fmt: skip
# Not drawn: what to_dict writes, and how stock compiles or batches.
ELSEWHERE = {"_from_model_config", "transformers_version", "compile_config", "continuous_batching_config"}
# Arguments of `generate` beside the prompt and GenerationConfig.
ARGUMENTS: list[dict[str, Any]] = [
    *[{}] * 80, {"labels": "like ids"}, {"token_type_ids": "like ids"}, {"logits_to_keep": 1}, {"synced_gpus": False},
    {"synced_gpus": True}, {"nonsense": 1},
]  # fmt: skip
PROCESSORS = ["reads ids", "keeps count", "looks across rows", "draws", "in place", "nan", "raises", "stock's top-p"]
CRITERIA = [
    "ends rows", "a column", "one row ends all", "keeps count", "draws", "raises", "stock's length", "stock's EOS",
]  # fmt: skip
PROMPTS = [
    *["ids"] * 8, "positional", "embeddings", "both", "no mask", "int32", "bool mask", "float mask", "positions",
    "none", "right padding", "no tokens",
]  # fmt: skip
ROUTES = [*["keywords"] * 4, "config", "model's config", "config and keywords", "custom_generate"]
CACHES = [*["none"] * 4, "dynamic", "bare", "static"]
# A call with nothing special about it.
PLAIN: dict[str, Any] = {
    "target": "llama", "attention": "sdpa", "weights": 0, "lengths": [7], "prompt": "ids", "seed": 0, "options": {},
    "processors": [], "criteria": [], "allowed tokens": False, "streamer": None, "negative prompt": False,
    "arguments": {}, "route": "keywords", "context": "plain", "cache": "none", "room": None, "turns": 1, "feed": "all",
    "crop": 0, "drafted turns": [True], "drafter": "replay", "captured": False, "misses": [0.0] * 12,
    "draft length": 6, "first tier": 16, "tree": None, "trace": False,
}  # fmt: skip


def draw(seed: int, index: int, drafter: str | None = None) -> dict[str, Any]:
    """The case of that number; everything in it follows from both, and from a drafter that is named."""
    rng = Random(f"{seed}-{index}")
    odd = rng.random() < 0.1
    target = rng.choice([name for name in TARGETS if name not in SLOW or rng.random() < 0.25])
    any_of_them = rng.choice(DRAFTERS)
    drafter = drafter or any_of_them
    lengths = [rng.randint(1, rng.choice([6, 14, 24])) for _ in range(rng.choice([1, 1, 1, 2, 3, 4]))]
    if target == "phi3, longrope":  # batches and crossings are refused
        lengths = lengths[:1]
    fields = {**(SAMPLING if rng.random() < 0.55 else {}), **FIELDS}
    options = {"do_sample": "top_k" in fields}
    options.update({name: rng.choice(values) for name, (often, values) in fields.items() if rng.random() < often})
    if "max_new_tokens" in options and rng.random() < 0.8:
        options.pop("max_length", None)
    if "eos_token_id" not in options:
        options.pop("exponential_decay_length_penalty", None)
    if odd:
        options.update([rng.choice(ODD)])
    own: dict[str, list[str]] = {
        "processors": rng.sample(PROCESSORS, rng.choice([0] * 7 + [1, 1, 2])),
        "criteria": rng.sample(CRITERIA, rng.choice([0] * 8 + [1, 1, 2])),
    }
    kept = rng.choice(CACHES)
    if kept != "none":
        options.pop("cache_implementation", None)  # stock takes one of them
    turns = rng.choice([1, 1, 2, 2, 3]) if kept != "none" else 1
    return {
        "target": target,
        "attention": "eager" if target in EAGER_ONLY else rng.choice(["sdpa", "sdpa", "eager"]),
        "weights": rng.randint(0, 1),
        "lengths": lengths,
        "prompt": rng.choice(PROMPTS if odd else PROMPTS[:-2]),
        "seed": rng.randint(0, 2**40),
        "options": options,
        **own,
        "allowed tokens": rng.random() < 0.06,
        "streamer": rng.choice([*[None] * 8, "records", "records", "interrupts"]),
        "negative prompt": rng.random() < 0.5,
        "arguments": rng.choice(ARGUMENTS),
        "route": rng.choice(ROUTES),
        "context": rng.choice(["plain"] * 6 + ["inference mode", "no grad", "float64 by default"]),
        "cache": kept,
        "room": rng.choice([None, -1, 0, 1]),  # of a static cache, beside what the call needs at most
        "turns": turns,
        "feed": rng.choice(["all", "all", "new tokens"]),
        "crop": rng.choice([0] * 6 + [1, 3]),
        "drafted turns": [turns == 1 or rng.random() < 0.8 for _ in range(turns)],
        "drafter": drafter,
        "captured": rng.random() < 0.2,
        "misses": [rng.choice([0.0, 0.0, 0.0, 0.0, 0.1, 0.3, 1.0]) for _ in range(12)],
        "draft length": rng.choice([1, 3, 6, 6, 12]),
        "first tier": rng.choice([8, 16, 64]),
        "tree": _tree(rng, drafter),
        "trace": rng.random() < 0.1,
    }


def _tree(rng: Random, drafter: str) -> TreeConfig | None:
    if rng.random() < 0.3:
        return None
    paper = rng.random() < 0.06
    return TreeConfig(
        nodes=20 if paper else rng.choice([None, 2, 5, 8, 13, 40]),
        depth=rng.choice([None, None, 1, 3, 7]),
        top_k=rng.choice([1, 2, 5, 16, VOCABULARY]),
        beam=rng.choice([1, 2, 12, 30]),
        lookup=rng.choice([0, 3, 24]),
        shared_noise=rng.random() < 0.7,
        selector=rng.random() < 0.8,
        draft_cost=rng.choice([None, 0.0, 0.0, 0.0, 0.5, 3.0]),
        node_cost=rng.choice([0.0, 0.0, 0.03, 0.4]),
        refine=rng.choice([0, 1, 2]) if drafter == "editor" else 0,
        scores="paper" if paper else "survival",
    )


@cache
def made_target(name: str, attention: str, weights: int) -> Any:
    family, config = TARGETS[name]
    target = attach(tiny_target(family, attention, seed=weights, **config))
    target(torch.tensor([[3, 4]]), output_hidden_states=True)  # transformers' own hooks come with the first such call
    return target


@cache
def made_drafter(name: str, attention: str, weights: int, kind: str) -> Any:
    """A drafter that is used again; replays know one text."""
    target = made_target(name, attention, weights)
    if kind == "lookup":
        return LookupDrafter()
    if kind == "language model":
        return LanguageModelDrafter(tiny_target("qwen3", num_hidden_layers=1), target)
    makers = {"diffusion": tiny_diffusion_drafter, "eagle": tiny_eagle_drafter}
    if kind in makers:
        return makers[kind](target)
    return tiny_head(target, **HEADS.get(kind, {}))


class Hostile(ReplayDrafter):
    """A replay whose logits are no numbers now and then, or that drafts nothing."""

    rounds = 0

    def propose(self, *args: Any, **kwargs: Any) -> Proposal | None:  # type: ignore[override]
        proposal = super().propose(*args, **kwargs)
        self.rounds += 1
        if self.rounds % 4 == 1:
            proposal.logits[:, 1:, 3:9] = torch.nan
        if self.rounds % 4 == 2:
            proposal.logits[:, 0] = -torch.inf
        return None if self.rounds % 4 == 3 else proposal
