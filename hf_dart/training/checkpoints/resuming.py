"""Is a checkpoint whole, and one of this run? What is asked before any of it is loaded."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import get_annotations
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Adam
from transformers import PreTrainedConfig, TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, CONFIG_NAME, SAFE_WEIGHTS_NAME

from hf_dart.drafters.dart.copied import fingerprint, same_fingerprint
from hf_dart.hub.download import ADAPTER_CONFIG

if TYPE_CHECKING:
    from hf_dart.training.trainers.base import DrafterTrainer

TARGET = "target.json"
"""File of a checkpoint: the fingerprint of each matrix of its target, by name."""

_NUMBER, _NONE = (int, float), type(None)
# What `Trainer` computes with, of the fields of a `TrainerState`.
_STATE: dict[str, Any] = {
    "global_step": int, "num_input_tokens_seen": int, "train_batch_size": int, "epoch": _NUMBER, "total_flos": _NUMBER,
    "logging_steps": _NUMBER, "save_steps": _NUMBER, "eval_steps": _NUMBER, "best_metric": (*_NUMBER, _NONE),
    "best_global_step": (int, _NONE), "best_model_checkpoint": (str, _NONE), "log_history": list,
    "stateful_callbacks": dict,
}  # fmt: skip
_OPTIONS = ("weight_decay", "betas", "eps")  # of the groups of an optimizer, where others keep what they have counted
_ADAPTER = ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "alpha_pattern")
_NAMES = ("target_name", "target_revision")  # of a target, whose weights may lie elsewhere by now

# What damaged files, or whole ones of something else, raise in those who read them.
_UNREADABLE = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, OSError, EOFError, BadZipFile,
    SafetensorError, UnpicklingError, zlib.error,
)  # fmt: skip


def check_checkpoint(checkpoint: str, trainer: DrafterTrainer) -> None:
    """Compare a checkpoint with the run that is to go on from it.

    Raises:
        ValueError: a part of it is missing or damaged, or is that of another run.
    """
    folder, drafter = Path(checkpoint), trainer.drafter
    if not folder.is_dir():
        raise ValueError(f"There is no checkpoint {folder}; give a folder checkpoint-N of a run.")
    same_target = _check_target(folder, trainer.target)
    _check_config(folder, drafter, same_target)
    # Sharded drafters have files of other names.
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        _check_state(folder)
        return
    for name in (TRAINER_STATE_NAME, OPTIMIZER_NAME, SCHEDULER_NAME):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds weights only, and no {name}; begin a run with `head: {folder}`.")
    _check_state(folder)
    for name in (OPTIMIZER_NAME, SCHEDULER_NAME, SCALER_NAME, *(file.name for file in folder.glob("rng_state*.pth"))):
        if (folder / name).is_file():
            with _readable(folder, name), ZipFile(folder / name) as file:
                if (part := file.testzip()) is not None:
                    raise ValueError(f"{part} is not what was written")
                with safe_globals():
                    torch.load(folder / name, map_location="cpu", mmap=True, weights_only=True)
    if drafter.adapted:
        _check_adapter(folder, drafter)
    else:
        _check_weights(folder, drafter)


def fingerprints(target: nn.Module) -> dict[str, float]:
    """Of the matrices of a target that are there as plain numbers, by name; quantized ones are not."""
    plain = {
        name: weight
        for name, weight in target.named_parameters()
        if weight.ndim > 1 and weight.dtype.is_floating_point and not weight.is_meta and type(weight.data) is Tensor
    }
    return dict(zip(plain, fingerprint(plain.values()), strict=True))


@contextmanager
def keeping_options(checkpoint: str, optimizer: Any, scheduler: Any) -> Iterator[None]:
    """The state of the optimizer that is loaded meanwhile goes on with the options that this run was given.

    Raises:
        ValueError: it is that of another optimizer.
    """
    given = [dict(group) for group in optimizer.param_groups]
    computed = hasattr(scheduler, "lr_lambdas")  # by the number of the step, and not from the metrics
    try:
        yield
        if hasattr(scheduler, "lr_lambdas") != computed:
            raise ValueError("its learning rate followed the steps, and this one's follows the metrics")
        for own, group in zip(given, optimizer.param_groups, strict=True):
            # Older checkpoints of schedules that follow the metrics lack it.
            group.setdefault("initial_lr", own.get("initial_lr"))
            if other := own.keys() ^ group.keys():
                raise ValueError(f"one has {min(other)} and one has not")
        if isinstance(getattr(optimizer, "optimizer", optimizer), Adam):
            # Its kernels do not look.
            for weight, kept in optimizer.state.items():
                if any(kept[moment].shape != weight.shape for moment in ("exp_avg", "exp_avg_sq")):
                    raise ValueError("of weights of other shapes")
    except torch.OutOfMemoryError:
        raise
    except _UNREADABLE as error:
        raise ValueError(
            f"{checkpoint} holds the state of another optimizer ({_words(error)}); resume with the options that the "
            f"run was begun with (its recipe.yaml), or begin a run with `head: {checkpoint}`."
        ) from error
    changed = False
    for own, group in zip(given, optimizer.param_groups, strict=True):
        if "max_momentum" not in own:  # else the betas are the schedule's
            group.update((name, own[name]) for name in _OPTIONS if name in own)
        rate, known = own["initial_lr"], group["initial_lr"]
        if rate != known:
            group["lr"] = group["lr"] * rate / known if known else rate
            group["initial_lr"], changed = rate, True
    if changed:
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


@contextmanager
def _readable(folder: Path, file: str) -> Iterator[None]:
    """What goes wrong meanwhile is the file's fault."""
    try:
        yield
    except _UNREADABLE as error:
        others = {
            int(step): path.name
            for path in folder.absolute().parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
            if path.name != folder.name and (step := path.name.rpartition("-")[2]).isdecimal()
        }
        mend = f"resume from {folder.parent / others[max(others)]} or begin anew" if others else "begin anew"
        raise ValueError(f"{folder} is damaged ({file}: {_words(error)}); {mend}.") from error


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _object(folder: Path, name: str) -> dict[str, Any]:
    """What a JSON file of the checkpoint holds."""
    with _readable(folder, name):
        content = json.loads((folder / name).read_text(encoding="utf8"))
        if not isinstance(content, dict):
            raise TypeError("no JSON object")
        return content


def _check_target(folder: Path, target: Any) -> bool:
    """Is the target known to be the one of the checkpoint? It need not say."""
    if not (folder / TARGET).is_file():
        return False
    known, own = _object(folder, TARGET), fingerprints(target)
    both = known.keys() & own.keys()
    with _readable(folder, TARGET):
        wrong = [name for name in both if not same_fingerprint([float(known[name])], [own[name]])]
    if wrong or (known and own and not both):
        name = target.config.name_or_path or type(target).__name__
        raise ValueError(
            f"{folder} was trained on another target, which has other weights than {name}; resume with the target that "
            "the run was begun with."
        )
    return bool(both)


def _check_config(folder: Path, drafter: Any, same_target: bool) -> None:
    """Weights would load into some drafters that mean something else by them."""
    if drafter.adapted != any((folder / name).is_file() for name in (ADAPTER_CONFIG, ADAPTER_SAFE_WEIGHTS_NAME)):
        parts = ("an adapter", "a whole drafter")
        ours_is, theirs_is = parts if drafter.adapted else parts[::-1]
        raise ValueError(
            f"{folder} holds {theirs_is} and this run trains {ours_is}; resume with the options that the run was begun "
            "with (its recipe.yaml)."
        )
    content, made = _object(folder, CONFIG_NAME), drafter.config
    given = {"model_type": (content.get("model_type"), made.model_type)}
    if content.get("model_type") == made.model_type:
        with _readable(folder, CONFIG_NAME):
            saved = type(made).from_dict(content)
        kinds = [kind for kind in type(made).__mro__ if issubclass(kind, PreTrainedConfig)]
        names = {name for kind in kinds[: kinds.index(PreTrainedConfig)] for name in get_annotations(kind)}
        given = {name: (getattr(saved, name), getattr(made, name)) for name in sorted(names)}
        if drafter.adapted:
            del given["fingerprint"]  # of the weights below, which are compared where adapters are read
    for name, (theirs, ours) in given.items():
        same = _plain(theirs) == _plain(ours) or (same_target and name in _NAMES)
        if name == "fingerprint" and theirs and ours:
            same = same_fingerprint(theirs, ours)
        if not same:
            raise ValueError(
                f"{folder} has {name}={theirs!r} and this run {ours!r}; resume with the options that the run was begun "
                "with (its recipe.yaml)."
            )


def _plain(value: Any) -> Any:
    """What a JSON file gives back, lists where there were tuples."""
    return json.loads(json.dumps(value))


def _check_state(folder: Path) -> None:
    content = _object(folder, TRAINER_STATE_NAME)
    with _readable(folder, TRAINER_STATE_NAME):
        state = TrainerState(**content)
        for name, kinds in _STATE.items():
            value = getattr(state, name)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise TypeError(f"{name} is {value!r}")
        if not all(isinstance(logged, dict) and "step" in logged for logged in state.log_history):
            raise TypeError("log_history is no list of what was logged")
        stored = state.stateful_callbacks.get("Patience")  # type: ignore[union-attr]
        if isinstance(stored, dict):
            int(stored["attributes"]["early_stopping_patience_counter"])
        kind, _, step = folder.name.rpartition("-")
        if kind == PREFIX_CHECKPOINT_DIR and step.isdecimal() and int(step) != state.global_step:
            raise ValueError(f"global_step is {state.global_step}")


def _check_weights(folder: Path, drafter: Any) -> None:
    left_out = drafter._keys_to_ignore_on_save or ()
    own = {name: list(weight.shape) for name, weight in drafter.state_dict().items() if name not in left_out}
    with _readable(folder, SAFE_WEIGHTS_NAME), safe_open(folder / SAFE_WEIGHTS_NAME, "pt") as weights:
        found = {name: list(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        for name in sorted(own.keys() | found.keys()):
            if own.get(name) != found.get(name):
                raise ValueError(f"{name} has the shape {found.get(name)}, and should have {own.get(name)}")


def _check_adapter(folder: Path, drafter: Any) -> None:
    """What its weights alone do not tell; they are compared where they are read."""
    saved = _object(folder, ADAPTER_CONFIG)
    with _readable(folder, ADAPTER_SAFE_WEIGHTS_NAME), safe_open(folder / ADAPTER_SAFE_WEIGHTS_NAME, "pt") as weights:
        weights.keys()
    made = drafter.peft_config[drafter.active_adapters()[0]].to_dict()
    for name in _ADAPTER:
        theirs, ours = saved.get(name), made.get(name)
        if isinstance(theirs, list) and isinstance(ours, (set, list)):
            theirs, ours = sorted(map(str, theirs)), sorted(ours)
        if theirs != ours:
            raise ValueError(
                f"The adapter in {folder} has {name}={theirs!r} and this run {ours!r}; resume with the options that "
                "the run was begun with (its recipe.yaml)."
            )
