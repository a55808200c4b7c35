"""Writer of a `DartHead` for vLLM (`hf_dart.interop.vllm`)."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from hf_dart.drafters.dart.drafter import DartHead
from hf_dart.interop import vllm


def write_vllm(head: DartHead, folder: str | Path, *, target: PreTrainedModel, verifier: str | None = None) -> None:
    """Write a head for vLLM: config.json and model.safetensors, without token embeddings, which are the target's.

    Args:
        head: bound to its target, without an adapter.
        folder: is made if there is none.
        target: the model that it drafts for.
        verifier: its Hub id or folder, for vLLM to find; the head's `target_name` if left out.

    Raises:
        ValueError: vLLM knows no such head; the message says why.
    """
    if head.adapted:
        raise ValueError("This head has an adapter, which vLLM does not know; call head.merge_adapter() first.")
    vllm.write_vllm(
        head.config,
        head.state_dict(),
        folder,
        lm_head=head.shared.lm_head,
        architecture=type(target).__name__,
        max_positions=int(target.config.get_text_config(decoder=True).max_position_embeddings),
        verifier=verifier,
    )
