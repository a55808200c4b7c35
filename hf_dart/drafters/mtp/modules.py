"""The multi-token prediction module of a target, read from the files of its checkpoint.

transformers knows the modules of several families (`MtpModel`) and how their weights are called. Those of Qwen3-Next
and Qwen3.5 (`mtp.*`) are made of the same parts, one layer of full attention; their configs only do not say so.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import cached_file

from hf_dart.drafters.stock_modules import refused
from hf_dart.hub.download import weight_files
from hf_dart.hub.errors import hub_errors
from hf_dart.interop.checkpoint import weight_shapes
from hf_dart.target.attention import TreeAttention
from hf_dart.target.devices import device_of

FIELDS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
"""What configs call the number of their modules."""


def module_count(content: dict[str, Any]) -> int:
    """How many modules a config.json says that its checkpoint has."""
    parts = [content, content.get("text_config")]
    found = [part.get(name) for part in parts if isinstance(part, dict) for name in FIELDS]
    return max((count for count in found if type(count) is int), default=0)


class _WithModules:
    """A target whose config says what `MtpModel` asks; all else is the target's own."""

    def __init__(self, target: PreTrainedModel, folder: str) -> None:
        self._target = target
        self.config = copy.deepcopy(target.config)
        self.config.name_or_path = folder
        text = self.config.get_text_config(decoder=True)
        count = module_count({name: getattr(text, name, None) for name in FIELDS})
        if not count:
            raise ValueError(
                f"The config of {folder} names no multi-token prediction module; give a drafter of another kind."
            )
        # transformers knows the numbers of the last layers of what is published, and this is that of any target.
        known = getattr(target, "_keys_to_ignore_on_load_unexpected", None) or []
        self._keys_to_ignore_on_load_unexpected = [*known, rf"(^|\.)layers\.{text.num_hidden_layers}\."]
        text._attn_implementation = TreeAttention(target).name  # its drafts are trees, too
        # The first module drafts all tokens.
        text.num_mtp_layers = 1
        if getattr(text, "layer_types", None) is not None:
            given = getattr(text, "mtp_layer_types", None) or ["full_attention"]
            text.mtp_layer_types = list(given[:1])
        if getattr(text, "mlp_layer_types", None) is not None:
            text.mtp_mlp_layer_types = list((getattr(text, "mtp_mlp_layer_types", None) or text.mlp_layer_types)[-1:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def read_module(path: str, target: PreTrainedModel, **where: Any) -> Any:
    """transformers' `MtpModel` of one layer, with the weights that a checkpoint has for it.

    Args:
        path: a folder or Hub repository: the target's.
        where: revision, token, ...

    Raises:
        ValueError: there is no such module, or it is damaged or that of another target.
    """
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise ValueError("This transformers has no multi-token prediction modules; install a newer one.") from error
    folder = _folder(path, **where)
    view = _WithModules(target, folder)
    missing = f"{path} holds no weights (model.safetensors); give the checkpoint of the target."
    weight_shapes(weight_files(path, missing, **where), path)  # all headers, before anything is read
    remedy = "many checkpoints are published without theirs, so give one that has it, of this target"
    with refused(f"The multi-token prediction module in {path}", remedy):
        module = MtpModel.from_pretrained(view, device_map={"": device_of(target.get_output_embeddings())})
    return module.eval().requires_grad_(False)


def _folder(path: str, **where: Any) -> str:
    """Where the files of a checkpoint lie on this machine."""
    if Path(path).is_dir():
        return path
    with hub_errors(path, **{name: where.get(name) for name in ("token", "revision")}):
        return str(Path(cached_file(path, "config.json", **where)).parent)
