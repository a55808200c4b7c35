"""Tiny random targets of many families, their heads, and a drafter that knows the answer.

The vocabulary is small, so that even a random head has drafts accepted, and the weights are large, so that
attention decides what comes next.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_dart import DartHead, TreeConfig
from hf_dart.drafters.base import Drafter, Proposal
from hf_dart.drafters.diffusion.drafter import DiffusionDrafter
from hf_dart.drafters.eagle.drafter import EagleDrafter
from hf_dart.models import trial as probe
from support.families import EXPERTS_IN_A_LOOP, FAMILIES, HYBRIDS, OTHERS, PAD, REFUSED, WITHOUT_ATTENTION
from support.families import VOCABULARY as VOCABULARY
from support.families import WINDOW as WINDOW


def tiny_target(
    family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float64, seed: int = 0, **config: Any
) -> Any:
    """A random causal LM in eval mode; the global generators are not moved."""
    model_type, fields = {**FAMILIES, **HYBRIDS, **REFUSED, **OTHERS}[family]
    attention = "eager" if family in WITHOUT_ATTENTION else attention
    options: dict[str, Any] = {"attn_implementation": attention, "dtype": dtype}
    if family in EXPERTS_IN_A_LOOP:
        options["experts_implementation"] = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**fields, **config}), **options)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim >= 2 and not any(part in name for part in ("embed", "wte", "wpe")):
                    weight.mul_(10.0)
    probe._passed[model] = passed_trials(repr((family, attention, config)))
    return model.eval()


@cache
def passed_trials(built_from: str) -> dict[Any, int]:
    """What targets that are built alike have passed, in all tests of this process."""
    return {}


SIZED: dict[str, Any] = {"draft_length": 5, "initializer_range": 0.3, "tree": {"nodes": 8}}
"""Fields of tiny drafters, whose trees are of a given size, since no node of theirs is worth its cost."""


def tiny_head(target: Any, **config: Any) -> DartHead:
    """A random head for a tiny target."""
    return DartHead.from_target(target, **{**SIZED, "feature_layers": [0, 1, 2], **config})


def tiny_diffusion_drafter(target: Any, **config: Any) -> DiffusionDrafter:
    """A random diffusion drafter that takes several steps and looks back no farther than a short window."""
    return DiffusionDrafter.from_target(target, **{**SIZED, "denoise_steps": 3, "context_window": 7, **config})


def tiny_eagle_drafter(target: Any, **config: Any) -> EagleDrafter:
    """A random autoregressive head."""
    return EagleDrafter.from_target(target, **{**SIZED, "feature_layers": [0, 1, 2], "beam": 3, **config})


def nearly(target: Any, noise: float = 0.02) -> Any:
    """A copy of a model whose weights are a little off."""
    other = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return other


def prompts(lengths: list[int], seed: int = 0, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Random prompts of those lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(2, vocabulary, (len(lengths), width), generator=generator)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


@dataclass
class ReplayState:
    lengths: Tensor  # [B] positions taken in


class ReplayDrafter(Drafter[ReplayState]):
    """Drafts known `sequences` [B, T], as `generate` returned them, and misses a share of their tokens in each row.

    It does not look at the hidden states that it asks for.
    """

    draft_length: Any = None
    feature_layers: Any = None

    def __init__(
        self, sequences: Tensor, pads: list[int], vocabulary: int, *, misses: list[float], draft_length: int = 6,
        hidden_layers: tuple[int, ...] = (), seed: int = 0,
    ) -> None:  # fmt: skip
        self.sequences, self.pads, self.vocabulary = sequences, torch.tensor(pads), vocabulary
        self.misses, self._generator = torch.tensor(misses), torch.Generator().manual_seed(seed)
        self.draft_length, self.feature_layers = draft_length, list(hidden_layers)
        self.tree_config = TreeConfig(nodes=8, shared_noise=False, lookup=0)
        self.last_stats = None

    def check_target(self, target: Any) -> None:
        """Any target does."""

    def begin(self, batch_size: int, capacity: int) -> ReplayState:
        return ReplayState(torch.zeros(batch_size, dtype=torch.long))

    def extend(self, state: ReplayState, features: Tensor, next_tokens: Tensor, counts: Tensor) -> None:
        state.lengths = state.lengths + counts

    def propose(
        self, state: ReplayState, features: Tensor, next_tokens: Tensor, counts: Tensor, depth: int | None = None
    ) -> Proposal:
        self.extend(state, features, next_tokens, counts)
        slots = (self.pads + state.lengths + 1)[:, None] + torch.arange(depth or self.draft_length)
        right = self.sequences.gather(1, slots.clamp(max=self.sequences.shape[1] - 1))
        wrong = torch.randint(self.vocabulary, right.shape, generator=self._generator)
        missed = torch.rand(right.shape, generator=self._generator) < self.misses[:, None]
        logits = torch.zeros(*right.shape, self.vocabulary)
        logits.scatter_(2, torch.where(missed, wrong, right)[..., None], 12.0)
        return Proposal(logits, torch.zeros(*right.shape, 1))
