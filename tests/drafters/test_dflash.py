"""Published DFlash drafters: logits as the published forward gives them, and text as stock gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cases import MODES
from support.compare import assert_identical, run, tally
from support.guests import ASSISTANT, ZLAB, dflash_config, dflash_drafter, dflash_tensors, published
from support.tiny import prompts, tiny_target
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

from hf_dart.decoding.candidate_generator import DartCandidateGenerator
from hf_dart.drafters.dflash.drafter import DFlashDrafter
from hf_dart.models.stock_steps import CACHE
from hf_dart.models.verify import features_request, gather_features

TALLY = tally("DFlash drafters in float64")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
# Everything that a published config may say about the pass.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "inner block size": {"block_size": None, "dflash_config__block_size": 4},
    "rope_parameters": {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}},
    "yarn": {"rope_theta": None, "rope_parameters": YARN},
    "llama3": {"rope_theta": 10000, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
    "sliding": SLIDING,
    "sliding, both directions": {**SLIDING, "is_causal": False},
    "causal": {"dflash_config__causal": True},
    "sliding by depth": {"layer_types": None, "sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1},
    "scales": {
        "dflash_config__input_embedding_scale": 3.0,
        "dflash_config__output_multiplier": 0.2,
        "final_logit_softcapping": 2.0,
    },
    "biases": {"attention_bias": True},
    "taps out of order": {"dflash_config__target_layer_ids": [1, 0]},
    "gelu": {"hidden_act": "gelu"},
}  # fmt: skip


@pytest.fixture
def target() -> Any:
    return tiny_target("qwen3")


def drafted_in_pieces(drafter: DFlashDrafter, features: Tensor, tokens: Tensor, lengths: list[int]) -> Tensor:
    """Logits [B, d, V] of a draft after `lengths` positions per row, taken in over several calls of uneven chunks."""
    state = drafter.begin(len(lengths), 4)
    taken = torch.zeros(len(lengths), dtype=torch.long)
    wanted = torch.tensor(lengths)
    generator = torch.Generator().manual_seed(1)
    while True:
        counts = torch.randint(0, 5, wanted.shape, generator=generator).minimum(wanted - taken - 1)  # one is left
        last = bool((taken + 4 >= wanted).all())
        counts = wanted - taken if last else counts
        entries = (taken[:, None] + torch.arange(max(1, int(counts.max())))).clamp(max=features.shape[1] - 1)
        rows = torch.arange(len(lengths))[:, None]
        chunk = (features[rows, entries], tokens[rows, entries + 1], counts)
        if last:
            return drafter.propose(state, *chunk).logits
        drafter.extend(state, *chunk)
        taken += counts


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_published_forward(target: Any, tmp_path: Path, variant: str) -> None:
    drafter = dflash_drafter(tmp_path, target, **VARIANTS[variant])
    config = dflash_config(target, ZLAB, **VARIANTS[variant])
    inner = config["dflash_config"]
    tokens = prompts([14, 14, 14])["input_ids"]
    features = gather_features(
        target(tokens, **features_request(drafter.feature_layers)), drafter.feature_layers, tokens
    )
    lengths = [11, 5, 9]
    table, lm_head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    size = inner.get("block_size", config.get("block_size"))
    for rows in ([0, 1, 2], [1]):
        ours = drafted_in_pieces(drafter, features[rows], tokens[rows], [lengths[row] for row in rows])
        for logits, row in zip(ours, rows, strict=True):
            text = lengths[row]
            block = torch.cat([tokens[row, text : text + 1], tokens.new_full((size - 1,), inner["mask_token_id"])])
            embedded = table[block] * inner.get("input_embedding_scale", 1.0)
            hidden = published(config, dflash_tensors(config), features[row, :text], embedded)
            expected = hidden[1:] @ lm_head.T * inner.get("output_multiplier", 1.0)
            if cap := config.get("final_logit_softcapping"):
                expected = cap * torch.tanh(expected / cap)
            torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("window", [3, 200])
def test_an_assistant_gives_the_logits_of_transformers_own(target: Any, tmp_path: Path, window: int) -> None:
    drafter = dflash_drafter(tmp_path, target, ASSISTANT, sliding_window=window)
    config = dflash_config(target, ASSISTANT, sliding_window=window)
    reference = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**config)).double().eval()
    reference.load_state_dict(load_file(tmp_path / "model.safetensors"))
    tokens = prompts([14])["input_ids"]
    features = gather_features(
        target(tokens, **features_request(drafter.feature_layers)), drafter.feature_layers, tokens
    )[:, :9]
    ours = drafted_in_pieces(drafter, features, tokens, [9])
    block = torch.cat([tokens[:, 9:10], tokens.new_full((1, 5), config["mask_token_id"])], dim=1)
    outputs = reference(
        noise_embeds=target.get_input_embeddings()(block),
        context_hidden_states=features,
        position_ids=torch.arange(15)[None],
        **{CACHE: _cache(reference, 9)},
    )
    theirs = target.get_output_embeddings()(outputs.last_hidden_state[:, 1:])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def _cache(assistant: Any, accepted: int) -> Any:
    from transformers.cache_utils import DFlashCache

    cache = DFlashCache(config=assistant.config)
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(accepted)
    return cache


def test_stocks_loop_accepts_as_many_of_its_own(target: Any, tmp_path: Path) -> None:
    """The same checkpoint as `assistant_model=` of stock and as a chain of ours in stock's loop: the same drafts."""
    drafter = dflash_drafter(tmp_path, target, ASSISTANT, sliding_window=200)
    config = MuseGlimmerAssistantConfig(**dflash_config(target, ASSISTANT, sliding_window=200))
    reference = MuseGlimmerAssistantModel(config).double().eval()
    reference.load_state_dict(load_file(tmp_path / "model.safetensors"))
    forwards: list[int] = []
    handle = target.register_forward_hook(lambda *_: forwards.append(1))
    inputs = prompts([7])
    options = {"do_sample": False, "max_new_tokens": 30}
    rounds = []
    for drafting in (
        {"assistant_model": reference, "speculation_type": "dflash"},
        {"custom_generate": DartCandidateGenerator.stock_loop(drafter)},
    ):
        forwards.clear()
        sequences = run(target, inputs, 0, **options, **drafting).sequences
        rounds.append((len(forwards), sequences.tolist()))
    handle.remove()
    assert rounds[0] == rounds[1]
    assert rounds[0][0] < 30, "drafts were accepted"


# ---- exactness ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("style", "variant"), [(ZLAB, "sliding"), (ZLAB, "causal"), (ASSISTANT, "plain")])
def test_variants_draft_exactly(target: Any, tmp_path: Path, style: str, variant: str) -> None:
    drafter = dflash_drafter(tmp_path, target, style, **VARIANTS[variant])
    assert_identical(target, drafter, prompts([12, 3]), **MODES["greedy"], max_new_tokens=20, into=TALLY)


def test_frequencies_are_not_rounded_with_the_weights(target: Any, tmp_path: Path) -> None:
    drafter = dflash_drafter(tmp_path, target)
    before = drafter._frequencies.clone()
    drafter.bfloat16()
    assert drafter._frequencies.dtype == torch.float32
    assert torch.equal(drafter._frequencies, before)
