"""Every kind of drafter, tiny and random, and a target that it fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hf_dart import LanguageModelDrafter, MtpDrafter, attach, load_drafter
from support.assistants import gemma4_drafter, gemma4_target
from support.checkpoints import save
from support.eagle3 import SPECULATORS, eagle3_config, eagle3_tensors
from support.guests import dflash_drafter
from support.modules import speculators_module, with_module
from support.relatives import relative
from support.tiny import nearly, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target


def loaded(make: Callable[[Path, Any], Any]) -> Callable[[Any], Any]:
    """The drafter of a kind that is loaded from files, as a function of its target alone."""

    def made(target: Any) -> Any:
        with TemporaryDirectory() as folder:
            return make(Path(folder), target)

    return made


def published(name: str) -> Callable[[Any], Any]:
    """The drafter of a relative of DFlash, as a function of its target alone."""
    return loaded(lambda folder, target: load_drafter(relative(folder, target, name), target=target))


def fed_back_after_the_norm(folder: Path, target: Any) -> Any:
    """An EAGLE-3.1 head in the format of speculators."""
    config = eagle3_config(target, SPECULATORS, fc_norm=True, norm_output=True, eagle_aux_hidden_state_layer_ids=[0, 1])
    return load_drafter(save(folder, config, eagle3_tensors(config, seed=2)), target=target)


MAKERS: dict[str, Callable[[Any], Any]] = {
    "dart": tiny_head,
    "eagle": tiny_eagle_drafter,
    "diffusion": tiny_diffusion_drafter,
    "dflash": loaded(dflash_drafter),
    "domino": published("Domino"),
    "language model": lambda target: LanguageModelDrafter(nearly(target), target),
    "mtp": MtpDrafter.from_target,
    "gemma4": loaded(gemma4_drafter),
}
PUBLISHED = {
    "dflash2": published("DFlash2"),
    "dspark": published("DSpark"),
    "eagle 3.1": loaded(fed_back_after_the_norm),
    "speculators' mtp": loaded(lambda folder, target: load_drafter(speculators_module(folder, target), target=target)),
}
"""Further files of other projects, whose drafts have tests of their own."""
SOME = range(3, 48, 2)
PARTS: dict[str, Callable[[Any], Any]] = {
    "peagle": lambda target: tiny_head(target, mask_mode="peagle", mask_token_id=46),
    "some tokens": lambda target: tiny_head(target, draft_vocabulary=SOME, selector_rank=4, editor=True),
    "eagle, some tokens": lambda target: tiny_eagle_drafter(target).reduce_vocabulary(SOME),
    "features": lambda target: tiny_diffusion_drafter(target, feature_layers=[0, 2], unmasking="left_to_right"),
}
"""Variants of those, with parts that others lack."""


def pair(kind: str, family: str = "llama") -> tuple[Any, Any]:
    """A target of a family, or of the only one that a kind of drafter is for, and its drafter."""
    with TemporaryDirectory() as folder:
        if kind == "mtp":
            target = with_module("glm4_moe", Path(folder), torch.float64)[0]
        else:
            target = attach(gemma4_target(vocab_size=48)) if kind == "gemma4" else tiny_target(family)
        return target, {**MAKERS, **PUBLISHED, **PARTS}[kind](target)
