"""Loading a drafter of whichever kind: `load_drafter`, and `load_once` for folders with a `custom_generate`."""

from __future__ import annotations

import logging
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from hf_dart.decoding.api import attach
from hf_dart.decoding.suffix_store import SuffixStore
from hf_dart.drafters.compatibility import unwrapped
from hf_dart.drafters.lookup import LookupDrafter
from hf_dart.drafters.registry import registered
from hf_dart.errors import sentence
from hf_dart.hub.download import HUB_OPTIONS, head_config, tensor_names
from hf_dart.hub.known_drafters import published_drafters
from hf_dart.hub.loading import head_path
from hf_dart.models.processes import is_shared

_AUTO = "auto"
_LOGGER = logging.getLogger(__name__)


def load_drafter(path: str, *, default: bool = False, **options: Any) -> Any:
    """Load the drafter in a folder or Hub repository, of whichever kind and format its config.json says.

    A log record of level INFO says in one sentence what was found there. With "auto" it is the best published drafter
    that is known for the target (`hf-dart info MODEL` lists them) and can be loaded; where there is none, copied text
    drafts ([`LookupDrafter`]), that of earlier calls too ([`SuffixStore`]), as a warning says.

    Args:
        path: a folder or a Hub repository, "auto", or "packaged" for the head that comes with the package.
        default: let every later `generate` of `target` draft with it, as `hf_dart.attach(target, drafter)` does.
        options: as for the `from_pretrained` of [`DartHead`] and the others: target, tokenizer, revision, token, ...

    Returns:
        The drafter, such as a [`DartHead`], for `generate(..., assistant=...)`.

    Raises:
        OSError: there are no such files, or the Hub does not give them.
        TypeError: an option is unknown, or `target` is no model.
        ValueError: drafter and target do not fit together, or the files are not those of a drafter.
    """
    if options.get("target") is None and (default or path == _AUTO):
        asked = "default=True" if default else "load_drafter('auto')"
        raise ValueError(f"{asked} needs the target that shall draft; pass target=model.")
    if path == _AUTO:
        return _best_drafter(default, **options)
    path = head_path(path)
    where = {name: options[name] for name in HUB_OPTIONS if name in options}
    content = head_config(path, **where)[0]
    kinds, names = registered(), cache(partial(tensor_names, path, **where))
    told = ((kind, found) for kind in kinds.values() if (found := kind.recognises(content, names)))
    kind, found = next(told, (kinds["dart"], None))
    drafter = kind.drafter.from_pretrained(path, **options)
    _LOGGER.info("%s holds %s, which %s reads.", path, found or kind.called, kind.drafter.__name__)
    if default:
        attach(options["target"], drafter)
    return drafter


def _best_drafter(default: bool, target: PreTrainedModel, **options: Any) -> Any:
    """Return the first drafter of the table that can be loaded for a target; else one of copied text."""
    model, reasons = unwrapped(target), list[str]()
    for known in published_drafters(model.config)[1]:
        try:
            return load_drafter(known["repository"], default=default, target=target, **options)
        except (OSError, ValueError) as reason:
            reasons.append(f"{known['repository']} is not used: {sentence(reason)}")
            _LOGGER.info(reasons[-1])
    drafter = LookupDrafter()
    attach(target, drafter if default else None)
    if not is_shared(model):  # such a target takes no memory
        model.generate.memory = model.generate.memory or SuffixStore().namespace("")
    _LOGGER.warning(
        f"hf_dart: no published drafter of {model.config.name_or_path or type(model).__name__} can be loaded"
        f"{f' ({reasons[0]})' if reasons else ''}, so text is copied from this call and earlier ones; `hf-dart info` "
        "says what is known, and how to train a head."
    )
    return drafter


_LOADED: WeakKeyDictionary[Any, dict[tuple[str, str | None], tuple[int, Any]]] = WeakKeyDictionary()


def load_once(path: str, target: PreTrainedModel, *, revision: str | None = None, **where: Any) -> Any:
    """Return the drafter at `path`, loaded for `target` at the first call and kept as long as that model is.

    `target.generate` stays as it is. Folders and repositories with a `custom_generate` folder load their own drafter
    so; a folder that was written again is loaded again.

    Args:
        path: a folder, or the id of a repository on the Hub.
        target: the model to draft for.
        revision, where: as for `from_pretrained`: token, cache_dir, ...

    Raises:
        OSError, ValueError: as [`load_drafter`].
    """
    model = unwrapped(target)
    drafters = _LOADED.setdefault(model, {})
    written = max((file.stat().st_mtime_ns for file in Path(path).glob("*")), default=0)  # 0: it is on the Hub
    if (path, revision) not in drafters or drafters[path, revision][0] != written:
        own = vars(model).get("generate")
        drafters[path, revision] = written, load_drafter(path, target=target, revision=revision, **where)
        vars(model).pop("generate", None)  # what its trial has shown stays known
        if own is not None:
            model.generate = own
    return drafters[path, revision][1]
