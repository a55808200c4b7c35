"""LoRA on draft heads: a domain, a language or a fine-tuned target in a few megabytes.

Adapters lie on the head in PEFT's way, as `transformers` keeps them on any model (`head.add_adapter`,
`head.load_adapter`, `head.set_adapter`). What a head has beyond that: a folder of an adapter holds nothing else and
still loads in one line; it knows the head it belongs to; and parts of a head that no adapter is put on (mask slots, for
heads of copied layers all that is new) are trained as a whole, by `modules_to_save`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_dart.drafters.dart.copied import fingerprint, initialise, same_fingerprint
from hf_dart.drafters.trained import TrainedDrafter, attach_to
from hf_dart.errors import missing_folder
from hf_dart.hub.checkpoint import headers, refused
from hf_dart.hub.download import (
    ADAPTER_CONFIG,
    HUB_OPTIONS,
    optional_file,
    optional_json,
    refuse_fields,
    refuse_options,
)
from hf_dart.interop.lora_config import lora_of
from hf_dart.models.devices import host_by_default
from hf_dart.trees.config import TreeConfig

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules that LoRA is put on by default, besides `fc`."""
_NEW = ("fc", "embedding_projection", "mask_slot", "norm", "selector", "editor")
_WEIGHTS = "adapter_model.safetensors"
_VOCABULARY = "draft_vocabulary.safetensors"
_PREFIX = "base_model.model."
# Fields of the config that say what an adapter was made for, or how it drafts, and do not affect its head's weights.
_SETTINGS = ("tree", "enable_thinking", "chat_template_hash", "draft_window", "draft_sink")


def add(head: TrainedDrafter, config: PeftConfig, name: str) -> None:
    """`DartHead.add_adapter`."""
    if not isinstance(config, PeftConfig):
        raise TypeError(
            f"add_adapter takes a config of PEFT, not {config!r:.100}; give peft.LoraConfig(r=16), for example."
        )
    copied = head.config.copied_layer is not None
    config.base_model_name_or_path, config.revision = (None, None) if copied else _base_of(head)
    if config.target_modules is None:
        config.target_modules = [*LAYERS] if copied else [*LAYERS, "fc"]
    paths = [path for path, _ in head.named_modules()]
    if config.modules_to_save is None or copied:
        parts = {path.rpartition(".")[2] for path in paths} & {*(_NEW if copied else ("mask_slot",))}
        config.modules_to_save = sorted({*(config.modules_to_save or ()), *parts})
    named = [*config.modules_to_save, *([] if isinstance(config.target_modules, str) else config.target_modules)]
    for one in named:
        if not any(path == one or path.endswith(f".{one}") for path in paths):
            raise ValueError(f"This head has no module {one!r}; those that take LoRA are {', '.join(LAYERS)} and fc.")
    _inject(head, config, name, f"The config of adapter {name!r}")


def _base_of(head: TrainedDrafter) -> tuple[str, str | None]:
    """Return the path or id of the head, as its adapters will name it, and its revision."""
    name, subfolder = head.name_or_path, head._place.get("subfolder")
    folder = Path(name, subfolder or "")
    if name and folder.is_dir():
        wanted = ["fc.weight", *(f"layers.{part}" for part, _ in head.layers.named_parameters())]
        stored = headers(folder.glob("model*.safetensors"), str(folder))
        found = fingerprint(stored[weight].read() for weight in wanted if weight in stored)
        if not peft_configs(head) and not same_fingerprint(base_fingerprint(head), found):
            raise ValueError(
                f"This head has other weights than the one in {folder}, where its adapter would look for it; "
                "save_pretrained it first."
            )
        return str(folder.resolve()), None
    if not name or subfolder or missing_folder(name):
        raise ValueError(
            "This head is in no folder or repository by whose name its adapter could be loaded again; save_pretrained "
            "the trained head first (LoRA on an untrained one learns little), or make it with copy_layer=."
        )
    return name, head._place.get("revision")


@host_by_default
def _inject(
    head: TrainedDrafter, config: PeftConfig, name: str, what: str, fill: Callable[[], None] | None = None
) -> None:
    """Put an adapter on a head and make it the active one, all of it or nothing; `fill` gives it weights of a file."""
    if name in peft_configs(head):
        raise ValueError(f"This head has an adapter {name!r} already; give another name.")
    before = head.active_adapters()[0] if peft_configs(head) else None
    if before is None:
        head._base_fingerprint = base_fingerprint(head)
    try:
        with refused(what, "give one that PEFT can put on this head"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several adapters are intended
            torch.default_generator.manual_seed(0)
            inject_adapter_in_model(config, head, name, low_cpu_mem_usage=fill is not None)
        head._hf_peft_config_loaded = True
        head.train(head.training)  # PEFT's new modules, dropout among them, are in train mode
        if fill is not None:
            fill()
    except BaseException:
        if before is None:
            unwrap(head, None)
        else:
            activate(head, before)
            if name in peft_configs(head):
                head.delete_adapter(name)
        raise
    activate(head, name)


def peft_configs(head: TrainedDrafter) -> dict[str, PeftConfig]:
    """Return the head's adapters by name."""
    return head.peft_config if head._hf_peft_config_loaded else {}


def base_fingerprint(head: TrainedDrafter) -> list[float]:
    """Return the fingerprint of the weights that adapters are put on; copied layers store theirs."""
    if head.config.fingerprint is not None:
        return list(head.config.fingerprint)
    return fingerprint([head.fc.weight, *head.layers.parameters()])


def activate(head: TrainedDrafter, name: str) -> None:
    """Adapter `name` alone works; it may train other whole modules than the one before, or none."""
    if name not in peft_configs(head):
        known = ", ".join(map(repr, peft_configs(head))) or "none"
        raise ValueError(f"This head has no adapter {name!r}; it has {known}: load it with head.load_adapter(path).")
    for module in head.modules():
        if isinstance(module, ModulesToSaveWrapper):
            module.set_adapter(name if name in module.modules_to_save else [])
        elif isinstance(module, BaseTunerLayer):
            module.set_adapter(name)


def unwrap(head: TrainedDrafter, merge: str | None) -> None:
    """Take all adapters off, adapter `merge` being folded into the weights first."""
    for path, module in list(head.named_modules()):
        if isinstance(module, BaseTunerLayer):
            if merge is not None:
                module.merge(safe_merge=True, adapter_names=[merge])
            plain = module.get_base_layer()
        elif isinstance(module, ModulesToSaveWrapper):
            plain = dict(module.modules_to_save.items()).get(merge, module.original_module)
        else:
            continue
        parent, _, child = path.rpartition(".")
        setattr(head.get_submodule(parent), child, plain)
    head._hf_peft_config_loaded = False
    head.__dict__.pop("peft_config", None)


@host_by_default
def from_folder(
    cls: Any, path: str, base: str | None, *, target: PreTrainedModel | None, tokenizer: Any, **kwargs: Any
) -> Any:
    """Load the head of the adapter in `path`, with it; None if there is no adapter (`DartHead.from_pretrained`)."""
    where = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
    listed = None if missing_folder(path) else optional_json(path, ADAPTER_CONFIG, **where)
    if listed is None:
        if base is not None:
            raise ValueError(f"base= is for adapters, and {path} holds none; leave it out.")
        return None
    content = optional_json(path, "config.json", **where)
    refuse_fields(path, content or {}, cls.config_class)
    if content is not None and content.get("copied_layer") is not None:
        refuse_options(kwargs.keys() - {"dtype"})
        if target is None:
            raise ValueError(f"The head of {path} has copied layers of its target; pass target=.")
        with torch.random.fork_rng(devices=[]):
            head = cls(cls.config_class.from_dict(content))  # untrained
        dtype = kwargs.get("dtype")
        attach_to(head, target, tokenizer, dtype=None if dtype == "auto" else dtype)
        initialise(head, target)
    else:
        base, place = _base_named(path, base, listed, where)
        options = {name: value for name, value in kwargs.items() if name not in HUB_OPTIONS}
        head = cls.from_pretrained(base, target=target, tokenizer=tokenizer, **place, **options)
    load(head, path, "default", **where)
    if content is not None:  # PEFT alone writes none
        with refused(f"The config.json in {path}", "fetch it again"):
            config = type(head.config).from_dict({**head.config.to_dict(), **content})
            head.tree_config = TreeConfig(**config.tree)
        for name in _SETTINGS:
            setattr(head.config, name, getattr(config, name))
        if head.lm_head is None:  # else it is the base's
            whole = config.draft_vocab_size is None
            head.reduce_vocabulary(None if whole else read_state(path, _VOCABULARY, **where)["draft_vocabulary"])
    return head.eval()


def _base_named(
    path: str, base: str | None, listed: dict[str, Any], where: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return the place of an adapter's head: `base`, else the one that its adapter_config.json names."""
    base, revision = (base, None) if base else (listed.get("base_model_name_or_path"), listed.get("revision"))
    if not base or not isinstance(base, str):
        raise ValueError(f"The adapter in {path} does not name its head; pass base=, the head's path.")
    if missing_folder(base):
        raise ValueError(f"The adapter in {path} belongs to the head in {base}, which is not there; pass base=.")
    place = {name: value for name, value in where.items() if name not in ("revision", "subfolder")}  # the adapter's
    place |= {"revision": revision} if isinstance(revision, str) else {}
    if optional_file(base, ADAPTER_CONFIG, **place) is not None:
        raise ValueError(f"The adapter in {path} belongs to {base}, an adapter itself; pass base=, the head's path.")
    return base, place


def save(head: TrainedDrafter, folder: Path) -> None:
    """Write what an adapter's folder needs besides transformers' files: the head's config and draft vocabulary."""
    config = copy.deepcopy(head.config)
    config.fingerprint = head._base_fingerprint
    config.save_pretrained(folder)
    if head.draft_vocabulary is not None:
        save_file({"draft_vocabulary": head.draft_vocabulary}, folder / _VOCABULARY, metadata={"format": "pt"})


def load(head: TrainedDrafter, path: str, name: str, **where: Any) -> None:
    """`DartHead.load_adapter`: all of it or nothing."""
    content = optional_json(path, ADAPTER_CONFIG, **where)
    if content is None:
        raise ValueError(f"{path} holds no {ADAPTER_CONFIG}; give the folder or the repository of an adapter.")
    _check_base(head, path, **where)
    state = read_state(path, **where)
    config = lora_of(path, content, state)
    _inject(head, config, name, f"The {ADAPTER_CONFIG} in {path}", fill=lambda: read(head, state, path, name, new=True))


def read(head: TrainedDrafter, state: dict[str, Tensor], path: str, name: str, new: bool = False) -> None:
    """Fill adapter `name`, which has no values yet if it is `new`, with `state`, whose every weight has to fit."""
    wanted = get_peft_model_state_dict(head, adapter_name=name, save_embedding_layers=False)
    wrong = sorted(wanted.keys() ^ state.keys())
    wrong += [key for key in sorted(wanted.keys() & state.keys()) if wanted[key].shape != state[key].shape]
    if wrong:
        raise ValueError(
            f"The adapter in {path} does not fit this head, or the r of its {ADAPTER_CONFIG} (first difference: "
            f"{wrong[0]}); load it on the head that it was trained for."
        )
    state = {key: weight.to(head.device, head.dtype, copy=True) for key, weight in state.items()}
    set_peft_model_state_dict(head, state, adapter_name=name, low_cpu_mem_usage=new)


def reread(head: TrainedDrafter, folder: str) -> None:
    """Give the active adapter the weights of one of its checkpoints."""
    _check_base(head, folder)
    read(head, read_state(folder), folder, head.active_adapters()[0])


def read_state(path: str, name: str = _WEIGHTS, **where: Any) -> dict[str, Tensor]:
    file = optional_file(path, name, **where)
    if file is None:
        raise ValueError(f"{path} holds an {ADAPTER_CONFIG} and no {name}; fetch the adapter as a whole.")
    return {key.removeprefix(_PREFIX): weight.read() for key, weight in headers([file], path).items()}


def _check_base(head: TrainedDrafter, path: str, **where: Any) -> None:
    """Check the base that an adapter written by hf_dart records; one that PEFT alone wrote records none."""
    known = (optional_json(path, "config.json", **where) or {}).get("fingerprint")
    own = head._base_fingerprint if peft_configs(head) else base_fingerprint(head)
    with refused(f"The config.json in {path}", "fetch it again"):
        same = known is None or own is None or same_fingerprint(known, own)
    if not same:
        raise ValueError(
            f"The adapter in {path} was trained on another head; load it on that one (its {ADAPTER_CONFIG} says which)."
        )
