"""Drafters beside `DartHead`, in the same seat: `hf_dart.proposal.Drafter`."""

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
    from hf_dart.drafters.dflash import DFlashDrafter
    from hf_dart.drafters.dflash_config import is_dflash
    from hf_dart.drafters.diffusion import DiffusionDrafter
    from hf_dart.drafters.eagle import EagleDrafter
    from hf_dart.fitted import HUB_OPTIONS
    from hf_dart.head import DartHead
    from hf_dart.hub.download import head_config
    from hf_dart.pair import missing_folder

    if missing_folder(path):
        raise ValueError(f"There is no folder {path}; give the folder or the Hub repository of a drafter.")
    where = {name: options[name] for name in HUB_OPTIONS if name in options}
    content = head_config(path, **where)[0]
    if is_dflash(content):
        return DFlashDrafter.from_pretrained(path, **options)
    kind = str(content.get("model_type"))
    others = {drafter.config_class.model_type: drafter for drafter in (DiffusionDrafter, EagleDrafter)}
    return others.get(kind, DartHead).from_pretrained(path, **options)
