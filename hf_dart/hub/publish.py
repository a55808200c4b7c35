"""Pushing a drafter: its weights, config, card, results and `custom_generate`, in one commit."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo, HfApi, constants
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from hf_dart.errors import sentence
from hf_dart.hub.card import BEGIN, END, has_markers, render_card
from hf_dart.hub.download import ADAPTER_CONFIG, optional_json
from hf_dart.hub.facts import TRAINING_RECORD, HeadFacts
from hf_dart.hub.failures import hub_errors
from hf_dart.hub.machine import versions

BENCH = "bench.json"
# A trainer's folder holds optimizer states too, which nobody needs to draft.
_WEIGHTS = ("config.json", ADAPTER_CONFIG, "*.safetensors", "*.safetensors.index.json", TRAINING_RECORD)
_OURS = [
    ADAPTER_CONFIG, "adapter_model.safetensors", "draft_vocabulary.safetensors", TRAINING_RECORD, BENCH,
    "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", ".eval_results/hf_dart.yaml",
]  # fmt: skip
"""Files of an earlier push, which would be read together with other weights, or describe them."""
_CUSTOM_GENERATE = Path(__file__).with_name("custom_generate")
_LOGGER = logging.getLogger(__name__)


def add_custom_generate(folder: str | Path) -> None:
    """Write to a drafter's folder what `generate(..., custom_generate=FOLDER, trust_remote_code=True)` runs."""
    made = Path(folder, _CUSTOM_GENERATE.name)
    made.mkdir(parents=True, exist_ok=True)
    for file in filter(Path.is_file, _CUSTOM_GENERATE.iterdir()):
        copyfile(file, made / file.name)  # without the rights of an installed package, which may be read-only


def push_folder(
    folder: str | Path,  # what `save_pretrained` or a trainer wrote
    repository: str,  # "name" or "user/name"
    *,
    card: str | None = None,  # text in place of the repository's card
    private: bool | None = None,  # this and what follows: as for `PreTrainedModel.push_to_hub`
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    **known: Any,  # what `HeadFacts.read` takes: bench, training, base_model, license, language, datasets, tags
) -> CommitInfo:
    """Push the drafter in `folder` to the Hub; the repository and the branch are made where there are none.

    What an earlier push left of other weights (an adapter, a bench, a training record) is deleted in the same commit.
    The repository's card stays, but for the part between its markers (`hf_dart.hub.card`); one without markers stays as
    a whole, and a warning says so.

    Raises:
        ValueError: a file in `folder`, or one that was named, cannot be used; or it is an adapter of a local head.
        OSError: the Hub refused; nothing was committed.
    """
    api = HfApi(library_name="hf-dart", library_version=versions(()).get("hf-dart"), token=token)
    facts = _facts(folder, repository, **known)  # raises before anything is created
    with hub_errors(repository, token=token, revision=revision):
        repository = api.create_repo(repository, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repository, branch=revision, exist_ok=True)
        parent = api.repo_info(repository, revision=revision).sha
        if card is None:
            card = _card_of(api, repository, parent)
        if card is not None and not has_markers(card):
            _LOGGER.warning(
                f"The card of {repository} was not written by hf-dart and stays as it is; put the lines {BEGIN!r} and "
                f"{END!r} where the part about the drafter shall stand."
            )
        with TemporaryDirectory() as whole:
            write_repository(folder, Path(whole), replace(facts, repository=repository), card)
            return api.upload_folder(
                repo_id=repository,
                folder_path=whole,
                commit_message=commit_message or f"Upload {facts.kind.drafter.__name__}",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
                parent_commit=parent,  # a card that is changed meanwhile is not overwritten
                delete_patterns=_OURS,
            )


def write_folder(folder: str | Path, destination: str | Path, repository: str, **known: Any) -> None:
    """Write what `push_folder` would push to a repository without a card to an empty `destination`, and ask no Hub."""
    destination = Path(destination)
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise ValueError(f"{str(destination)!r} is there already; give an empty folder, or a name that is free.")
    write_repository(folder, destination, _facts(folder, repository, **known), None)


def _facts(folder: str | Path, repository: str, **known: Any) -> HeadFacts:
    """Facts about the drafter, which others have to be able to load."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(f"{repository!r} is no repository ({sentence(error)}); give one such as user/name.") from error
    base = (optional_json(str(folder), ADAPTER_CONFIG) or {}).get("base_model_name_or_path")
    if base is not None and (Path(base).is_absolute() or Path(base).is_dir()):
        raise ValueError(f"The head of this adapter is in {base}; push that head too, and name it in {ADAPTER_CONFIG}.")
    facts = HeadFacts.read(folder, repository=repository, **known)
    if facts.base_model is None:
        _LOGGER.warning(
            f"It is not known which model of the Hub {repository} drafts for, so its card cannot say how to use it; "
            "name it with --base-model (base_model=)."
        )
    return facts


def write_repository(folder: str | Path, destination: Path, facts: HeadFacts, card: str | None) -> None:
    """Write all files of the drafter's repository to `destination`; `card` is the card as it is now."""
    destination.mkdir(exist_ok=True, parents=True)
    for file in [file for pattern in _WEIGHTS for file in Path(folder).glob(pattern)]:
        copyfile(file, destination / file.name)
    for name, record in ((TRAINING_RECORD, facts.training), (BENCH, facts.bench)):
        if record is not None:
            (destination / name).write_text(json.dumps(record, indent=2) + "\n", encoding="utf8")
    add_custom_generate(destination)
    (destination / constants.REPOCARD_NAME).write_text(render_card(facts, card), encoding="utf8", newline="")


def _card_of(api: HfApi, repository: str, revision: str | None) -> str | None:
    try:
        file = api.hf_hub_download(repository, constants.REPOCARD_NAME, revision=revision)
    except RemoteEntryNotFoundError:  # a local one says that the request failed; the file may exist
        return None
    return Path(file).read_bytes().decode("utf-8-sig")
