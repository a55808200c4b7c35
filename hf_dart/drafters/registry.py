"""The kinds of drafters: one line, `@register(...)` on the class, makes a kind known everywhere.

From it come what `load_drafter` recognises, what `hf-dart train --drafter` takes, what a card on the Hub says, and the
class as a name of `hf_dart`. The kinds of this package are found by their folders: `hf_dart/drafters/NAME/drafter.py`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedConfig, PreTrainedModel

from hf_dart.decoding.api import AttachedGenerate, attach, detach, unwrapped
from hf_dart.errors import annotated, refuse_unknown
from hf_dart.hub.download import HUB_OPTIONS, head_config, tensor_names
from hf_dart.hub.kinds import KINDS, CardTexts, Kind

Names = Callable[[], Collection[str]]
Class = TypeVar("Class", bound=type[Any])
# What their `from_pretrained` takes and does not name.
_OF_TRANSFORMERS = (
    "allow_all_kernels", "attn_implementation", "device_map", "device_mesh", "distributed_config", "dtype",
    "experts_implementation", "gguf_file", "kernel_config", "key_mapping", "max_memory", "offload_buffers",
    "offload_folder", "proxies", "quantization_config", "tp_plan", "tp_size", "trust_remote_code", "use_kernels",
    "variant",
)  # fmt: skip
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Registered:
    """One kind of drafter.

    Attributes:
        drafter: its class, with `from_pretrained(path, target=...)`.
        model_type: of its config; None if it has none of transformers.
        trainers: by the name that `hf-dart train --drafter` takes: "module:class" of the trainer.
        called: what one is called, with its article.
        reads: what a config.json describes, if it is that of a checkpoint in another format, which its
            `from_pretrained` reads too.
        reads_named: the same, from a config.json and what gives the names of the tensors beside it.
    """

    drafter: Any
    model_type: str | None
    trainers: dict[str, str]
    called: str
    reads: Callable[[dict[str, Any]], str | None]
    reads_named: Callable[[dict[str, Any], Names], str | None]

    def recognises(self, content: dict[str, Any]) -> str | None:
        """What `content` is called, if it is the config.json of such a drafter."""
        own = self.model_type is not None and content.get("model_type") == self.model_type
        return self.called if own else self.reads(content)


_REGISTERED: dict[str, Registered] = {}


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
    """A decorator that makes a class of drafters known: to loading, to `hf-dart train`, to cards, and in `hf_dart`.

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
        model_type = None if config is None else config.model_type
        called = f"a {drafter.__name__}" if card is None else card.called
        _REGISTERED[name] = Registered(drafter, model_type, trainers, called, reads, reads_named)
        if config is not None:
            drafter.config_class = config
            if card is not None:
                module = "hf_dart" if drafter.__module__.startswith("hf_dart.") else drafter.__module__
                trained_as = None if trainer is None else name
                KINDS[config.model_type] = Kind(config, drafter.__name__, module, trained_as, card)
        return drafter

    return add


def registered() -> dict[str, Registered]:
    """All kinds by their names; those of this package are imported first."""
    for folder in iter_modules([str(Path(__file__).parent)]):
        if folder.ispkg:
            import_module(f"{__package__}.{folder.name}.drafter")
    return dict(_REGISTERED)


def trainers() -> dict[str, tuple[Any, str]]:
    """What `hf-dart train --drafter` takes: the class of the drafter, and "module:class" of its trainer."""
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


def load_drafter(path: str, *, default: bool = False, **options: Any) -> Any:
    """Load the drafter in a folder or Hub repository, of whichever kind and format its config.json says.

    What was found there is logged in one sentence, at the level of information.

    Args:
        path: a folder or a Hub repository.
        default: let every later `generate` of `target` draft with it, as `hf_dart.attach(target, drafter)` does.
        options: as for the `from_pretrained` of [`DartHead`] and the others: target, tokenizer, revision, token, ...

    Returns:
        The drafter, such as a [`DartHead`], for `generate(..., assistant=...)`.

    Raises:
        OSError: there are no such files, or the Hub does not give them.
        TypeError: an option is unknown, or `target` is no model.
        ValueError: drafter and target do not fit together, or the files are not those of a drafter.
    """
    if default and options.get("target") is None:
        raise ValueError("default=True needs the target that shall draft; pass target=model.")
    where = {name: options[name] for name in HUB_OPTIONS if name in options}
    content = head_config(path, **where)[0]
    kinds, names = registered(), cache(partial(tensor_names, path, **where))
    named = ((kind, found) for kind in kinds.values() if (found := kind.reads_named(content, names)))
    told = ((kind, found) for kind in kinds.values() if (found := kind.recognises(content)))
    kind, found = next(chain(named, told), (kinds["dart"], None))
    check_options(kind.drafter, content, options, "default")
    drafter = kind.drafter.from_pretrained(path, **options)
    _LOGGER.info("%s holds %s, which %s reads.", path, found or kind.called, kind.drafter.__name__)
    if default:
        attach(options["target"], drafter)
    return drafter


_LOADED: WeakKeyDictionary[Any, dict[tuple[str, str | None], tuple[int, Any]]] = WeakKeyDictionary()


def load_once(path: str, target: PreTrainedModel, *, revision: str | None = None, token: Any = None) -> Any:
    """The drafter at `path`, loaded for `target` at the first call and kept as long as that model is.

    `target.generate` stays as it is. Folders and repositories with a `custom_generate` folder load their own drafter
    so; a folder that was written again is loaded again.

    Raises:
        OSError, ValueError: as [`load_drafter`].
    """
    drafters = _LOADED.setdefault(target, {})
    written = max((file.stat().st_mtime_ns for file in Path(path).glob("*")), default=0)  # 0: it lies on the Hub
    if (path, revision) not in drafters or drafters[path, revision][0] != written:
        was_attached = isinstance(vars(target).get("generate"), AttachedGenerate)
        drafters[path, revision] = written, load_drafter(path, target=target, revision=revision, token=token)
        if not was_attached:
            detach(target)
    return drafters[path, revision][1]
