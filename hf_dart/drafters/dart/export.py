"""Writing a `DartHead` in the formats of other projects (`hf_dart.interop`)."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from hf_dart.drafters.dart.drafter import DartHead
from hf_dart.interop import original_dart, vllm


def write_original(head: DartHead, folder: str | Path) -> None:
    """Write a head in the format of DART's code: config.json and model.safetensors, without token embeddings.

    Args:
        head: bound to its target, whose LM head is copied if the head has none of its own.
        folder: is made if there is none.

    Raises:
        ValueError: DART's code knows no such head; the message says why.
    """
    _refuse_adapter(head)
    original_dart.write_original(head.config, head.state_dict(), folder, lm_head=head.shared.lm_head)


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
    _refuse_adapter(head)
    vllm.write_vllm(
        head.config,
        head.state_dict(),
        folder,
        lm_head=head.shared.lm_head,
        architecture=type(target).__name__,
        max_positions=int(target.config.get_text_config(decoder=True).max_position_embeddings),
        verifier=verifier,
    )


def _refuse_adapter(head: DartHead) -> None:
    if head.adapted:
        raise ValueError("This head has an adapter, which other formats do not know; call head.merge_adapter() first.")
