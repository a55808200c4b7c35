"""Which calls can be captured, and when what was captured no longer holds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_dart.cache.hybrid import HybridCache
from hf_dart.cache.ragged import RaggedCache
from hf_dart.decoding.session import Session
from hf_dart.drafters.dart.drafter import DartHead
from hf_dart.drafters.vocabulary import state_of
from hf_dart.engine import processing
from hf_dart.engine.job import HeadJob, Job
from hf_dart.models.attention import FLEX
from hf_dart.models.devices import matmul_precision
from hf_dart.models.identity import identity
from hf_dart.models.positions import rotary_moves
from hf_dart.models.processes import group_of
from hf_dart.models.running_states.mixers import takes_levels
from hf_dart.models.support import parts_of
from hf_dart.models.verify import Verifier


def job_of(session: Session) -> Job | str:
    """The job that the engine can go on with, or why the target cannot run on fixed shapes in this call."""
    target, cache, verify = session.request.model, session.cache, session.verify
    if isinstance(cache, HybridCache) and takes_levels(target):
        return "the target keeps running states, which go through a tree level by level, as the host lays it out"
    on_slots = not isinstance(cache, HybridCache) or cache.on_slots
    if not isinstance(cache, RaggedCache | HybridCache) or not on_slots or not isinstance(verify, Verifier):
        return "the target's cache keeps more than keys and values"
    asked = [
        (verify.attention.name == FLEX, "the target attends by FlexAttention, whose block masks the host makes"),
        (session.hidden_states is not None, "it collects hidden states"),
        (rotary_moves(target), "the target's rotary frequencies follow the length of the text"),
        (len({weight.device for weight in target.parameters()}) > 1, "the target does not lie on one device"),
        (group_of(target) is not None, "several processes hold the target together"),
        (any(hasattr(part, "_hf_hook") for part in target.modules()), "the target is offloaded by accelerate"),
        (_hooked(target), "the target has forward hooks, which a replayed round would not call"),
    ]
    refused = next((reason for holds, reason in asked if holds), None)
    if refused is not None:
        return refused
    drafter = session.request.drafter
    head = drafter if isinstance(drafter, DartHead) and drafter.device == target.device else None
    return Job(session, cache, verify, head)


def head_job(job: Job) -> HeadJob | str:
    """The same as a job whose whole rounds can be captured, or what they ask the host for."""
    rows, drafter, config = job.rows, job.drafter, job.config
    drafts = config.nodes != 1
    if not isinstance(drafter, DartHead):
        return f"a {type(drafter).__name__} drafts with the host's help"
    if job.head is None:
        return "target and head do not lie on one device"
    processors = job.session.request.processors
    unknown = processing.key(processors, rows.prompt_length) is None
    asked = [
        (unknown, f"it has logits processors ({_names(processors)})"),
        (rows.in_step or rows.end_tokens is None, "it has stopping criteria of its own, or collects every step"),
        (drafts and config.refine > 0, "its drafts are refined (TreeConfig.refine)"),
    ]
    refused = next((reason for holds, reason in asked if holds), None)
    return refused or HeadJob(job.session, job.cache, job.verify, job.head)


def signature(job: Job) -> tuple[Any, ...]:
    """What differs when graphs no longer compute what the models would: weights elsewhere, other adapters or code.

    What the head has made of its weights and of those that it borrows differs when they are written to, too.
    """
    target, head = job.model, job.drafter
    parts: list[Any] = [identity(target), *_precision()]
    parts += [*map(id, parts_of(target))]  # modules in place of others
    models: list[Any] = [target]
    if isinstance(head, DartHead):
        models.append(head)
        parts += [id(head.draft_vocabulary), id(head.ngram)]
        made_of = [*head.parameters(), head.shared.embeddings.weight, head.shared.lm_head.weight]
        parts += [state_of(weight) for weight in made_of]
    for model in models:
        tensors = [*model.parameters(), *model.buffers()]
        parts += [(tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in tensors]
        layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "merged_adapters")]  # PEFT's
        parts += [(layer.active_adapters, layer.disable_adapters, repr(layer.merged_adapters)) for layer in layers]
        parts += [repr(getattr(layer, "scaling", None)) for layer in layers]
    return tuple(parts)


def _precision() -> list[Any]:
    """How PyTorch was told to compute, which a captured kernel does for good."""
    matmul, backends = torch.backends.cuda.matmul, torch.backends.cuda
    reduced = (matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction)
    kernels = (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled())
    return [matmul_precision(), *map(str, reduced), *kernels, backends.cudnn_sdp_enabled()]


def _hooked(target: PreTrainedModel) -> bool:
    """Has the target hooks of the user's? Those of transformers, once installed, stay and are idle in a round."""
    return any(
        not str(getattr(hook, "__module__", "")).startswith("transformers.")
        for part in target.modules()
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
    )


def _names(parts: Any) -> str:
    return ", ".join(type(part).__name__ for part in parts)
