"""Compares a checkpoint with the run that is to resume from it, before any of it is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, CONFIG_NAME, SAFE_WEIGHTS_NAME

from hf_dart.drafters.dart.copied import fingerprint, same_fingerprint
from hf_dart.errors import sentence
from hf_dart.hub.download import ADAPTER_CONFIG

TARGET = "target.json"
"""File of a checkpoint: the fingerprint of each matrix of its target, by name."""

_NAMES = {"target_name", "target_revision"}  # of a target, whose weights may be elsewhere by now
_ADAPTER = ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "alpha_pattern")
_BEGUN_WITH = "resume with the options that the run was begun with (its recipe.yaml)"


def check_checkpoint(checkpoint: str | Path, drafter: Any, target: PreTrainedModel, sharded: bool = False) -> None:
    """Compare a checkpoint with the drafter that is to be trained on from it, and with its target.

    Args:
        checkpoint: a folder checkpoint-N of a run.
        drafter: the model that is trained.
        target: of the run.
        sharded: optimizer and weights are files of FSDP's or DeepSpeed's, which are not looked at.

    Raises:
        ValueError: a part of it is missing or damaged, or is that of another run.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        raise ValueError(f"There is no checkpoint {folder}; give a folder checkpoint-N of a run.")
    same_target = _check_target(folder, target)
    _check_config(folder, drafter, same_target)
    for name in (TRAINER_STATE_NAME, *(() if sharded else (OPTIMIZER_NAME, SCHEDULER_NAME))):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds weights only, and no {name}; begin a run with `head: {folder}`.")
    with readable(folder, TRAINER_STATE_NAME):
        TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
    if not sharded:
        (_check_adapter if drafter.adapted else _check_weights)(folder, drafter)


def fingerprints(target: nn.Module) -> dict[str, float]:
    """Fingerprints of a target's matrices by name, for `target.json`; quantized ones are left out."""
    plain = {
        name: weight
        for name, weight in target.named_parameters()
        if weight.ndim > 1 and weight.dtype.is_floating_point and not weight.is_meta and type(weight.data) is Tensor
    }
    return dict(zip(plain, fingerprint(plain.values()), strict=True))


@contextmanager
def readable(checkpoint: str | Path, part: str) -> Iterator[None]:
    """Put what goes wrong while a part of a checkpoint is read into one sentence.

    Raises:
        ValueError: anything went wrong but a lack of memory.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever torch, safetensors, json and transformers raise of a damaged or foreign file
        raise ValueError(
            f"{checkpoint} cannot be resumed ({part}: {sentence(error).rstrip('.')}); {_BEGUN_WITH}, or from another "
            "checkpoint."
        ) from error


def _object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the checkpoint."""
    with readable(folder, name):
        content = json.loads((folder / name).read_text(encoding="utf8"))
        if not isinstance(content, dict):
            raise TypeError("no JSON object")
        return content


def _check_target(folder: Path, target: PreTrainedModel) -> bool:
    """Returns whether the target is known to be the checkpoint's, which need not say."""
    if not (folder / TARGET).is_file():
        return False
    known, own = _object(folder, TARGET), fingerprints(target)
    both = known.keys() & own.keys()
    with readable(folder, TARGET):
        wrong = [name for name in both if not same_fingerprint([float(known[name])], [own[name]])]
    if wrong or (known and own and not both):
        name = target.config.name_or_path or type(target).__name__
        raise ValueError(
            f"{folder} was trained on another target, which has other weights than {name}; resume with the target that "
            "the run was begun with."
        )
    return bool(both)


def _check_config(folder: Path, drafter: Any, same_target: bool) -> None:
    """Weights would load into some drafters of another config, and mean something else there."""
    if drafter.adapted != any((folder / name).is_file() for name in (ADAPTER_CONFIG, ADAPTER_SAFE_WEIGHTS_NAME)):
        kinds = ("an adapter", "a whole drafter")
        trained, held = kinds if drafter.adapted else kinds[::-1]
        raise ValueError(f"{folder} holds {held} and this run trains {trained}; {_BEGUN_WITH}.")
    content, made = _object(folder, CONFIG_NAME), drafter.config
    names = {one.name for one in fields(made)} - {one.name for one in fields(PreTrainedConfig)} | {"model_type"}
    known, own = {"model_type": content.get("model_type")}, {"model_type": made.model_type}
    if known == own:
        with readable(folder, CONFIG_NAME):
            known, own = type(made).from_dict(content).to_dict(), made.to_dict()
    names -= _NAMES if same_target else set()
    names -= {"fingerprint"} if drafter.adapted else set()  # compared where the adapter is read
    _compare(str(folder), known, own, sorted(own.keys() & names))


def _compare(what: str, known: dict[str, Any], own: dict[str, Any], names: Iterable[str]) -> None:
    """Raises a `ValueError` that names the first of the fields that is another one in this run."""
    for name in names:
        theirs, ours = known.get(name), own.get(name)
        if name == "fingerprint" and theirs and ours:
            same = same_fingerprint(theirs, ours)
        else:
            same = json.dumps(theirs, sort_keys=True) == json.dumps(ours, sort_keys=True)  # tuples come back as lists
        if not same:
            raise ValueError(f"{what} has {name}={theirs!r} and this run {ours!r}; {_BEGUN_WITH}.")


def _check_weights(folder: Path, drafter: Any) -> None:
    left_out = drafter._keys_to_ignore_on_save or ()
    own = {name: list(weight.shape) for name, weight in drafter.state_dict().items() if name not in left_out}
    with readable(folder, SAFE_WEIGHTS_NAME), safe_open(folder / SAFE_WEIGHTS_NAME, "pt") as weights:
        found = {name: list(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        for name in sorted(own.keys() | found.keys()):
            if own.get(name) != found.get(name):
                raise ValueError(f"{name} has the shape {found.get(name)}, and should have {own.get(name)}")


def _check_adapter(folder: Path, drafter: Any) -> None:
    """Compares the settings of an adapter; its weights are compared where they are read."""
    saved = _object(folder, ADAPTER_CONFIG)
    with readable(folder, ADAPTER_SAFE_WEIGHTS_NAME), safe_open(folder / ADAPTER_SAFE_WEIGHTS_NAME, "pt") as weights:
        weights.keys()
    made = drafter.peft_config[drafter.active_adapters()[0]].to_dict()
    for one in (saved, made):  # PEFT keeps a set, which has no order
        if isinstance(one.get("target_modules"), (set, list)):
            one["target_modules"] = sorted(map(str, one["target_modules"]))
    _compare(f"The adapter in {folder}", saved, made, _ADAPTER)
