"""A target and its drafter, loaded together from folders or the Hub, for the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hf_dart.errors import UserError, as_user_error, missing_folder
from hf_dart.hub.loading import PACKAGED, PACKAGED_HEAD, load_target


class Pair(NamedTuple):
    """A target, its drafter and its tokenizer, and the name of each for reports."""

    model: Any  # transformers takes seconds to import, and `hf-dart --help` imports this
    head: Any
    tokenizer: Any
    target_name: str
    head_name: str

    def added_parameters(self, drafter: Any) -> int:
        """Return the number of weights that a drafter adds to the target's; copied text needs none."""
        from torch import nn

        shared, parts = {*self.model.parameters()}, (drafter, *vars(drafter).values())
        own = next((part for part in parts if isinstance(part, nn.Module)), nn.Module())
        return sum(weight.numel() for weight in own.parameters() if weight not in shared)


def load_pair(
    target: str | None = None,  # folder or Hub id, or `PACKAGED`; None is the one that the head was made for
    head: str | None = None,  # the same; None is the packaged target's, and copied text alone with others
    dtype: str | None = None,  # one of `DTYPES`; None is float32 for the packaged target, else as they were saved
    **options: Any,  # of `from_pretrained` of the target, such as `device_map`
) -> Pair:
    """Load a target, its tokenizer and its head, attached; a `UserError` if one cannot be loaded or they do not fit."""
    target = target or target_of(head)
    return with_head(*load_quietly(target, dtype, **options), target, head)


def load_quietly(target: str, dtype: str | None, **options: Any) -> tuple[Any, Any]:
    """Do what `load_target` does, without transformers' progress bars and warnings."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return load_target(target, dtype, **options)


def with_head(model: Any, tokenizer: Any, target: str, head: str | None) -> Pair:
    """Load the head of a target that is loaded; arguments and errors as for `load_pair`."""
    from hf_dart.decoding.api import attach
    from hf_dart.drafters.lookup import LookupDrafter

    head = head or (PACKAGED if target == PACKAGED else None)
    if head is not None:
        return Pair(model, load_head(head, model, tokenizer), tokenizer, shown_name(target, "target"), shown_name(head))
    with as_user_error():
        attach(model)
    return Pair(model, LookupDrafter(), tokenizer, shown_name(target, "target"), "copied text")


def target_of(head: str | None) -> str:
    """Return the target that a head was made for: `PACKAGED`, which None is for as well, or a folder or Hub id.

    That is the target of its training (recipe.yaml of the run, training.json), or a Hub id in its config; a `UserError`
    where its files do not say, or the target is not where they say.
    """
    import yaml

    from hf_dart.hub.download import head_config, optional_json
    from hf_dart.hub.facts import TRAINING_RECORD

    if head in (None, PACKAGED) or Path(head).resolve() == PACKAGED_HEAD.resolve():
        return PACKAGED
    if head == "auto":
        raise UserError("--head auto is the drafter known for a target; give --target, too.")
    with as_user_error(about=f"Cannot load the head {head!r}"):
        config, recipe = head_config(head)[0], (optional_json(head, TRAINING_RECORD) or {}).get("recipe")
        of_run = Path(head).parent / "recipe.yaml"  # names a local folder by its full path
        if recipe is not None and of_run.is_file():
            recipe = yaml.safe_load(of_run.read_text(encoding="utf8"))
    named = recipe.get("target", PACKAGED) if isinstance(recipe, dict) else config.get("target_name")
    if isinstance(named, str):
        hub_id = "/" in named and not missing_folder(named)
        if named == PACKAGED or hub_id or Path(named).is_dir():
            return named
    told = f"names {named!r}, which is not here" if named else "holds no config.json that names its target"
    raise UserError(f"The head {head!r} {told}; give --target, the model that it was made for.")


def thinking_of(pair: Pair) -> dict[str, bool]:
    """Return the flag of chat templates with which the head's conversations were framed; empty where it had none."""
    thinking = getattr(getattr(pair.head, "config", None), "enable_thinking", None)
    return {} if thinking is None else {"enable_thinking": thinking}


def shown_name(path: str, part: str = "head") -> str:
    """Return the name of a target or head in reports: a folder's path says nothing on another machine; its name may."""
    if path == PACKAGED:
        return f"{path} {part}"
    folder = Path(path).resolve()
    if not folder.is_dir():
        return path
    if folder.name in ("model", "head"):
        return f"{folder.parent.name} {folder.name}"
    return folder.parent.name if folder.name == "final" else folder.name  # `hf-dart train` writes RUN/final


def load_head(path: str, model: Any, tokenizer: Any, dtype: str | None = None) -> Any:
    """Load a head for a target as `load_pair` does; `dtype` None is the target's, "auto" as the head was saved."""
    from hf_dart.decoding.load_drafter import load_drafter

    with as_user_error(OSError, ValueError, RuntimeError, about=f"Cannot load the head {path!r}"):
        return load_drafter(path, target=model, tokenizer=tokenizer, dtype=dtype)
