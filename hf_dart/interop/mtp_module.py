"""The multi-token prediction module of a target, read from the files of its checkpoint.

transformers knows the modules of several families (`MtpModel`) and how their weights are called. Others:

- Qwen3-Next and Qwen3.5 (`mtp.*`): one layer of full attention; Qwen3-Next's config names no module.
- MiMo (`model.mtp_layers.N.*`), which transformers runs as a Qwen2: the hidden state comes first in `input_proj`.
- Heads of speculators (`mtp_layers.0.*`, a checkpoint of their own), for several families: called like MiMo's, but the
  embedding comes first. Only the config tells them from MiMo's.
- MiMo-V2 (`model.mtp.layers.N.*`): sliding attention and a dense MLP; the config names no module.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection
from typing import Any

from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel

from hf_dart.hub.checkpoint import headers, refused
from hf_dart.hub.download import head_config, weight_files
from hf_dart.models.attention import TreeAttention
from hf_dart.models.devices import device_of
from hf_dart.models.features import layer_count, lm_head_of

_FIELDS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Names of the number of modules in configs."""

_MARKS = r"(^|\.)mtp_layers\.0\.", r"(^|\.)mtp\.layers\.0\.eh_proj\.", r"^mtp\.fc\."  # MiMo, MiMo-V2, Qwen
# After MtpModel's own renamings, which take "model." and "mtp." off and put the parts of a layer into its mtp_block.
_RENAMED = {
    r"^mtp_layers\.(\d+)\.token_layernorm\.": r"layers.\1.enorm.",
    r"^mtp_layers\.(\d+)\.hidden_layernorm\.": r"layers.\1.hnorm.",
    r"^mtp_layers\.(\d+)\.eh_proj\.": r"layers.\1.eh_proj.",
    r"^mtp_layers\.(\d+)\.final_layernorm\.": r"layers.\1.post_norm.",
    r"^mtp_layers\.(\d+)\.": r"layers.\1.mtp_block.",
    r"\.mtp_block\.final_layernorm\.": ".post_norm.",
    r"\.mtp_block\.pre_mlp_layernorm\.": ".mtp_block.post_attention_layernorm.",
}


def module_count(content: dict[str, Any]) -> int:
    """Return the number of modules that a config.json says its checkpoint has."""
    parts = [content, content.get("text_config")]
    found = [part.get(name) for part in parts if isinstance(part, dict) for name in _FIELDS]
    return max((count for count in found if type(count) is int), default=0)


def _marked(names: Collection[str]) -> list[bool]:
    """Tell for each of `_MARKS` whether a checkpoint has tensors of such names."""
    return [any(re.search(mark, name) for name in names) for mark in _MARKS]


def module_format(content: dict[str, Any], names: Callable[[], Collection[str]]) -> str | None:
    """Return a description if a config.json, or the names of the tensors, are those of a checkpoint with a module."""
    if content.get("speculators_model_type") == "mtp":
        return "a multi-token prediction head in the format of speculators"
    unnamed = str(content.get("model_type")).startswith(("mimo_v2", "qwen3_next")) and any(_marked(names()))
    return "a target with a multi-token prediction module" if module_count(content) or unnamed else None


class _WithModules:
    """A target whose config says what `MtpModel` asks, of an `embedding_first` too; all else is the target's own."""

    def __init__(
        self, target: PreTrainedModel, folder: str, names: Collection[str] = (), embedding_first: bool = False
    ) -> None:
        self._target = target
        self.config = copy.deepcopy(target.config)
        self.config.name_or_path = folder
        text = self.config.get_text_config(decoder=True)
        self.config.dtype = text.dtype = target.dtype  # save_pretrained leaves its name there
        count = module_count({name: getattr(text, name, None) for name in _FIELDS})
        first, second, third = _marked(names)
        if not (count or first or second or third):
            raise ValueError(f"{folder} names no multi-token prediction module; give a drafter of another kind.")
        # transformers knows the layer numbers of published models only, and this module may be of any target.
        known = getattr(target, "_keys_to_ignore_on_load_unexpected", None) or []
        ours = [rf"(^|\.)layers\.{text.num_hidden_layers}\."]
        if first or second:
            # A plain 0 would be taken for a layer number of the target.
            known, ours = [], [r"(^|\.)mtp_layers\.[0]\.", r"(^|\.)mtp\.layers\.[0]\."]
            renamed = [WeightRenaming(source_patterns=one, target_patterns=other) for one, other in _RENAMED.items()]
            self._weight_conversions = [*renamed, *(getattr(target, "_weight_conversions", None) or ())]
            text.mtp_hidden_states_first = first and not embedding_first
        self._keys_to_ignore_on_load_unexpected = [*known, *ours]
        text._attn_implementation = TreeAttention(target).name  # its drafts are trees, too
        # The first module drafts all tokens.
        text.num_mtp_layers = 1
        if getattr(text, "layer_types", None) is not None:
            given = getattr(text, "mtp_layer_types", None) or ["sliding_attention" if second else "full_attention"]
            text.mtp_layer_types = list(given[:1])
        if getattr(text, "mlp_layer_types", None) is not None:
            kinds = ["dense"] if second else getattr(text, "mtp_mlp_layer_types", None) or text.mlp_layer_types
            text.mtp_mlp_layer_types = list(kinds[-1:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def read_module(path: str, target: PreTrainedModel, **where: Any) -> Any:
    """Load transformers' `MtpModel` of one layer from a checkpoint: the target's, or that of a head of speculators."""
    content, _ = head_config(path, **where)
    files = weight_files(path, f"{path} holds no weights (model.safetensors); give the target's checkpoint.", **where)
    tensors = headers(files, path)  # before anything is read
    of_speculators = content.get("speculators_model_type") == "mtp"
    view = _WithModules(target, str(files[0].parent), tensors, of_speculators)
    remedy = "many checkpoints are published without theirs, so give one that has it in floating point, of this target"
    steps = [getattr(one, "operations", None) for one in getattr(view, "_weight_conversions", None) or ()]
    with refused(f"The multi-token prediction module in {path}", remedy):
        for name, one in tensors.items():
            own = re.search(rf"(^|\.)(mtp\w*|layers\.{layer_count(target)})\.", name)
            if own and one.dtype.startswith(("F8", "I8", "U8")) and "Dequantize" not in str(steps):
                raise ValueError(f"{name} is saved as {one.dtype}, and would be read without its scales")
        module = MtpModel.from_pretrained(view, device_map={"": device_of(lm_head_of(target))})
    return module.eval().requires_grad_(False)
