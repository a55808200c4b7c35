"""`load_drafter`: a drafter of whichever kind a folder holds."""

from __future__ import annotations

from typing import Any


def load_drafter(path: str, **options: Any) -> Any:
    """The drafter in a folder or Hub repository, of whichever kind its config.json says.

    Args:
        path: as for the `from_pretrained` of [`DartHead`], [`DiffusionDrafter`], [`EagleDrafter`] and
            [`DFlashDrafter`].
        options: as for those: target, tokenizer, revision, token, ...

    Raises:
        OSError, ValueError: as those.
    """
    from transformers import PreTrainedConfig

    from hf_dart.drafters.dart.drafter import DartHead
    from hf_dart.drafters.dflash.configuration import is_dflash
    from hf_dart.drafters.dflash.drafter import DFlashDrafter
    from hf_dart.drafters.diffusion.drafter import DiffusionDrafter
    from hf_dart.drafters.eagle.drafter import EagleDrafter
    from hf_dart.hub.download import HUB_OPTIONS

    where = {name: options[name] for name in HUB_OPTIONS if name in options}
    content = PreTrainedConfig.get_config_dict(path, **where)[0]
    if is_dflash(content):
        return DFlashDrafter.from_pretrained(path, **options)
    kind = str(content.get("model_type"))
    others = {drafter.config_class.model_type: drafter for drafter in (DiffusionDrafter, EagleDrafter)}
    return others.get(kind, DartHead).from_pretrained(path, **options)
