"""The options of a run: flags, and a YAML or JSON file that they override."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from hf_dart.drafters.registry import trainers
from hf_dart.errors import did_you_mean, sentence
from hf_dart.training.data.sources import DataArguments
from hf_dart.training.trainers.arguments import (
    DrafterArguments,
    DrafterTrainingArguments,
    LoraArguments,
    TargetArguments,
)
from hf_dart.training.trainers.trainer import DrafterTrainer


@dataclass(frozen=True)
class Recipe:
    """The options of one run of `hf-dart train`, by what they are about."""

    target: TargetArguments
    head: DrafterArguments
    lora: LoraArguments
    data: DataArguments
    training: DrafterTrainingArguments
    given: dict[str, Any]  # those that are others than the default, by name; tokens of the Hub left out


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}.")


def trainer_of(drafter: str) -> type[DrafterTrainer[Any]]:
    """Return the trainer of a kind of drafter, as that was registered (`hf_dart.drafters.registry.register`)."""
    known = trainers()
    if drafter not in known:
        raise ValueError(f"drafter is {drafter!r}; give one of {', '.join(sorted(known))}.")
    return resolve_name(known[drafter][1])


def _groups(drafter: str) -> tuple[type, ...]:
    """Return the options of that kind of drafter, by what they are about."""
    trainer = trainer_of(drafter)
    return TargetArguments, *trainer.drafter_arguments, DataArguments, trainer.training_arguments


def _options(drafter: str) -> set[str]:
    return {one.name for group in _groups(drafter) for one in fields(group) if one.init}


def parser(drafter: str = "dart") -> HfArgumentParser:
    """Return a parser with a flag for every option of that kind of drafter."""
    made = _Parser(
        _groups(drafter),
        prog="hf-dart train",
        usage="hf-dart train [RECIPE] [--OPTION VALUE ...]",
        description="Train a draft head. The options may also stand in RECIPE, a YAML or JSON file; flags override it.",
        allow_abbrev=False,  # a misspelled option must not become another one
    )
    kinds = next(action for action in made._actions if action.dest == "drafter")
    kinds.choices = sorted(trainers())
    return made


def read_recipe(words: Sequence[str]) -> Recipe:
    """Return the options of a command line, whose first word may be a YAML or JSON file of names and values."""
    flags = list(words)
    if flags and not flags[0].startswith("-"):
        flags = [*_as_flags(_read(Path(flags[0]))), *flags[1:]]
    kind = drafter_of(flags)
    known = _options(kind)
    for word in flags:
        name = word[2:].partition("=")[0].replace("-", "_")
        if word.startswith("--") and not {name, name.removeprefix("no_")} & known:
            of = next((other for other in trainers() if name in _options(other)), None)
            others = did_you_mean(name, known, otherwise="'hf-dart train --help' lists all.")
            remedy = others if of is None else f"it is one of --drafter {of}, and this is --drafter {kind}."
            raise ValueError(f"There is no option {name!r}; {remedy}")
    reader = parser(kind)
    space, rest = reader.parse_known_args(flags)
    if rest:
        raise ValueError(f"{rest[0]!r} belongs to no option; a recipe file comes first, a value after its option.")
    options = ((name, value) for name, value in vars(space).items() if value != reader.get_default(name))
    given = {name: value for name, value in options if not name.endswith("_token")}  # no access token is recorded
    target, head, *lora, data, training = reader.parse_args_into_dataclasses(flags, look_for_args_file=False)
    if training.output_dir == "trainer_output" and "output_dir" not in given:
        raise ValueError("output_dir is missing; name the folder that the run is written to.")
    return Recipe(target, head, lora[0] if lora else LoraArguments(), data, training, given)


def drafter_of(flags: Sequence[str]) -> str:
    """Return the kind of drafter that a command line asks for."""
    reader = _Parser(add_help=False, allow_abbrev=False)
    reader.add_argument("--drafter", default="dart")
    return reader.parse_known_args(list(flags))[0].drafter


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"There is no recipe {str(file)!r}; name a YAML or JSON file, or give its options as flags.")
    try:
        # Parse JSON with `json`: its error messages are better than YAML's.
        text = file.read_text(encoding="utf8")
        content = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"Cannot read the recipe {str(file)!r}: {sentence(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"The recipe {str(file)!r} holds no options; give lines such as 'max_steps: 1000'.")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


def _as_flags(options: dict[str, Any]) -> list[str]:
    """Options of a file as words of a command line, so that both are checked alike; null leaves the default."""
    words = []
    for name, value in options.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value is not None:
            value = "no" if value is False and name.endswith("_strategy") else value  # YAML's false is `no`, too
            words.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return words
