"""Facts about a drafter that is to be published, read from its files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from hf_dart.errors import head_inside
from hf_dart.hub.checkpoint import headers, read_json
from hf_dart.hub.download import ADAPTER_CONFIG
from hf_dart.hub.kinds import KINDS, CardTexts, Kind, kind_of

TRAINING_RECORD = "training.json"
_FOLDERS = ("output_dir", "cache_dir", "logging_dir", "resume_from_checkpoint")
_BENCH = ("command", "dtype", "hardware", "head_parameters", "results", "settings", "text", "versions")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def publishable(recipe: dict[str, Any]) -> dict[str, Any]:
    """Make a recipe for everybody to read, without folders of this machine; local paths by their names."""

    def shown(value: Any) -> Any:
        if isinstance(value, list):
            return [shown(one) for one in value]
        if not isinstance(value, str) or not re.search(r"[/\\]", value):
            return value
        local = value.startswith((".", "~")) or Path(value).is_absolute() or Path(value).exists()
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1] if local else value

    return {name: shown(value) for name, value in recipe.items() if name not in _FOLDERS}


@dataclass(frozen=True)
class HeadFacts:
    """Facts that a card is written from; the sentence of one that is None or empty is left out."""

    kind: Kind
    texts: CardTexts
    config: PreTrainedConfig
    parameters: int  # that are stored
    size: int  # in bytes
    dtype: str
    repository: str | None = None  # the drafter's id on the Hub
    base_model: str | None = None  # the target's
    training: dict[str, Any] | None = None  # `hf_dart.training.record.training_record`
    bench: dict[str, Any] | None = None  # what `hf-dart bench --json` wrote
    # Fields of the card's front matter, in the Hub's spelling.
    license: str | None = None
    language: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        folder: str | Path,  # with config.json, model.safetensors and perhaps training.json
        *,
        bench: str | Path | None = None,  # the file that `hf-dart bench --json` wrote
        training: str | Path | None = None,  # the training record, if it does not lie in `folder`
        **known: Any,
    ) -> HeadFacts:
        """Read the facts of the drafter that `save_pretrained` or a trainer wrote to `folder`.

        `known` are the other attributes, as they are. Left out, `base_model` is the target's name in the config if that
        is one, and `license` that under which another project published the drafter, if one did.
        """
        folder = Path(folder)
        file = folder / "config.json"
        kind = kind_of(read_json(file).get("model_type")) if file.is_file() else None
        if kind is None or kind.config_class is None or kind.texts is None:
            called = " or ".join(sorted(one.called for one in KINDS.values() if one.config_class is not None))
            remedy = head_inside(folder) or "give what save_pretrained wrote."
            raise ValueError(f"{folder} holds no config.json of {called}; {remedy}")
        config = kind.config_class.from_pretrained(folder)
        parameters, size, dtype = _weights(folder)
        training_file = Path(training) if training is not None else folder / TRAINING_RECORD
        told = training is not None or training_file.is_file()
        record = _record(training_file, "the trainer", "steps") if told else None
        if record is not None and isinstance(record.get("recipe"), dict):
            record = {**record, "recipe": publishable(record["recipe"])}
        report = None if bench is None else _record(Path(bench), "hf-dart bench --json", *_BENCH)
        # Layers copied from the target and the head of an adapter are counted there and not stored here.
        whole = vars(config).get("copied_layer") is None and not (folder / ADAPTER_CONFIG).is_file()
        if report is not None and whole and report["head_parameters"] != parameters:
            there = report["head_parameters"]
            raise ValueError(f"{bench} measured {there} parameters, this head has {parameters}; give its own bench.")
        # A target's name without a namespace is an id of the Hub only if it has a commit there.
        name = config.target_name
        on_hub = name is not None and ("/" in name or config.target_revision is not None)
        known["base_model"] = known.get("base_model") or (name if on_hub else None)
        known["license"] = known.get("license") or config.origin_license
        return cls(kind, kind.texts, config, parameters, size, dtype, training=record, bench=report, **known)


def _weights(folder: Path) -> tuple[int, int, str]:
    """Parameters, bytes and dtype of all safetensors files in `folder`."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no weights (*.safetensors); give what save_pretrained wrote.")
    stored = headers(files, str(folder)).values()
    floats = [tensor for tensor in stored if tensor.dtype in _DTYPES]  # ids of the draft vocabulary are no parameters
    dtypes = {_DTYPES[tensor.dtype] for tensor in floats}
    parameters = sum(prod(tensor.shape) for tensor in floats)
    return parameters, sum(file.stat().st_size for file in files), " and ".join(sorted(dtypes))


def _record(file: Path, wrote: str, *keys: str) -> dict[str, Any]:
    """Read the object in `file`, which `wrote` wrote and which has these keys."""
    content = read_json(file)
    if not content.keys() >= set(keys):
        raise ValueError(f"{file} is not what {wrote} writes; give that file.")
    return content
