"""The kinds of drafters: one line, `@register(...)` on the class, makes a kind known everywhere.

From it come what `load_drafter` recognises, what `hf-dart train --drafter` takes, what a card on the Hub says, and the
class as a name of `hf_dart`. The kinds of this package are found by their folders: `hf_dart/drafters/NAME/drafter.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeVar

from transformers import PreTrainedConfig, PreTrainedModel

from hf_dart.drafters.compatibility import unwrapped
from hf_dart.errors import annotated, refuse_unknown
from hf_dart.hub.download import HUB_OPTIONS
from hf_dart.hub.kinds import KINDS, CardTexts, Kind, Names

Class = TypeVar("Class", bound=type[Any])
# Options that `from_pretrained` takes without naming them.
_OF_TRANSFORMERS = (
    "allow_all_kernels", "attn_implementation", "device_map", "device_mesh", "distributed_config", "dtype",
    "experts_implementation", "gguf_file", "kernel_config", "key_mapping", "max_memory", "offload_buffers",
    "offload_folder", "proxies", "quantization_config", "tp_plan", "tp_size", "trust_remote_code", "use_kernels",
    "variant",
)  # fmt: skip


def _nothing_else(*content: Any) -> None:
    return None


def register(
    name: str,
    *,
    config: type[PreTrainedConfig] | None = None,
    trainer: str | None = None,
    variants: dict[str, str] | None = None,
    card: CardTexts | None = None,
    reads: Callable[[dict[str, Any]], str | None] = _nothing_else,
    reads_named: Callable[[dict[str, Any], Names], str | None] = _nothing_else,
) -> Callable[[Class], Class]:
    """Make a class of drafters known, as a decorator: to loading, `hf-dart train`, cards, and in `hf_dart`.

    Args:
        name: of the kind, such as "eagle".
        config: the class of its config, with a `model_type` of its own; it becomes the class's `config_class`.
        trainer: "module:class" of what `hf-dart train --drafter NAME` trains it with (a `DrafterTrainer`).
        variants: other names for `--drafter`, and the trainer of each.
        card: what its card on the Hub says.
        reads: what a config.json describes, such as "an EAGLE-3 head in the original format", if it is that of a
            checkpoint in another format that the class reads; else None.
        reads_named: the same, for formats whose config.json does not tell: its second argument gives the names of the
            tensors, for which their headers are fetched.
    """

    def add(drafter: Class) -> Class:
        trainers = {**({} if trainer is None else {name: trainer}), **(variants or {})}
        KINDS[name] = Kind(name, drafter, config, trainers, card, reads, reads_named)
        if config is not None:
            drafter.config_class = config
        return drafter

    return add


def registered() -> dict[str, Kind]:
    """Return all kinds by their names; those of this package are imported first."""
    for folder in iter_modules([str(Path(__file__).parent)]):
        if folder.ispkg:
            import_module(f"{__package__}.{folder.name}.drafter")
    return dict(KINDS)


def trainers() -> dict[str, tuple[Any, str]]:
    """Return the choices of `hf-dart train --drafter`: the class of the drafter, and "module:class" of its trainer."""
    found = registered().values()
    return {name: (kind.drafter, trainer) for kind in found for name, trainer in kind.trainers.items()}


def check_options(kind: Any, content: Mapping[str, Any], options: Mapping[str, Any], *others: str) -> None:
    """Raise for what is no option of `kind.from_pretrained`: its own, transformers', or a field of the config.

    Args:
        kind: a class of drafters.
        content: of the config.json.
        options: as given.
        others: names of further options.

    Raises:
        TypeError: one is unknown, or `target` is no model.
    """
    makers = (one.from_pretrained for one in (*kind.__mro__, PreTrainedModel) if "from_pretrained" in vars(one))
    named = {name for make in makers for name in inspect.signature(make).parameters}
    fields = annotated(getattr(kind, "config_class", None) or object)
    known = {*named, *fields, *content, *HUB_OPTIONS, *_OF_TRANSFORMERS, *others}
    refuse_unknown(options, known, "Loading a drafter takes no option")
    if options.get("target") is not None:
        unwrapped(options["target"])
