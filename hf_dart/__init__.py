"""Lossless, faster `model.generate()`: DART draft heads, token trees, exact verification."""

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_dart.drafters import hooks

if TYPE_CHECKING:
    from hf_dart.bench.page import View
    from hf_dart.decoding.api import attach, detach, generate
    from hf_dart.decoding.candidate_generator import DartCandidateGenerator
    from hf_dart.decoding.load_drafter import load_drafter, load_once
    from hf_dart.decoding.suffix_store import SuffixStore
    from hf_dart.drafters.dart.configuration import DartConfig
    from hf_dart.drafters.dart.drafter import DartHead
    from hf_dart.drafters.dflash.drafter import DFlashDrafter
    from hf_dart.drafters.diffusion.drafter import DiffusionDrafter
    from hf_dart.drafters.eagle.drafter import EagleDrafter
    from hf_dart.drafters.gemma4.drafter import Gemma4Drafter
    from hf_dart.drafters.language_model.drafter import LanguageModelDrafter
    from hf_dart.drafters.lookup import LookupDrafter
    from hf_dart.drafters.mtp.drafter import MtpDrafter
    from hf_dart.engine.engine import compile
    from hf_dart.learning.learner import Learner
    from hf_dart.serve.batcher import Batcher
    from hf_dart.serve.many import generate_many, iterate_many
    from hf_dart.trees.config import TreeConfig
    from hf_dart.trees.ngram.table import NgramTable

__version__ = "0.2.0"

__all__ = [
    "Batcher", "DFlashDrafter", "DartCandidateGenerator", "DartConfig", "DartHead", "DiffusionDrafter",
    "EagleDrafter", "Gemma4Drafter", "LanguageModelDrafter", "Learner", "LookupDrafter", "MtpDrafter", "NgramTable",
    "SuffixStore", "TreeConfig", "View", "__version__", "attach", "compile", "detach", "generate", "generate_many",
    "iterate_many", "load_drafter", "load_once",
]  # fmt: skip

_HOMES = {
    "Batcher": "serve.batcher",
    "DartCandidateGenerator": "decoding.candidate_generator",
    "DartConfig": "drafters.dart.configuration",
    "TreeConfig": "trees.config",
    "View": "bench.page",
    "DartHead": "drafters.dart.drafter",
    "DFlashDrafter": "drafters.dflash.drafter",
    "DiffusionDrafter": "drafters.diffusion.drafter",
    "EagleDrafter": "drafters.eagle.drafter",
    "Gemma4Drafter": "drafters.gemma4.drafter",
    "LanguageModelDrafter": "drafters.language_model.drafter",
    "Learner": "learning.learner",
    "LookupDrafter": "drafters.lookup",
    "MtpDrafter": "drafters.mtp.drafter",
    "NgramTable": "trees.ngram.table",
    "SuffixStore": "decoding.suffix_store",
    "attach": "decoding.api",
    "compile": "engine.engine",
    "load_drafter": "decoding.load_drafter",
    "load_once": "decoding.load_drafter",
    "detach": "decoding.api",
    "generate": "decoding.api",
    "generate_many": "serve.many",
    "iterate_many": "serve.many",
}


hooks.decoding = partial(import_module, "hf_dart.decoding.api")


def __getattr__(name: str) -> Any:
    # Imported on first use: `hf-dart --help` does not wait for torch.
    if name in _HOMES:
        return getattr(import_module(f"hf_dart.{_HOMES[name]}"), name)
    if not name.startswith("_"):
        kinds = import_module("hf_dart.drafters.registry").registered().values()
        for kind in kinds:  # each class of drafters that was registered
            if kind.drafter.__name__ == name:
                return kind.drafter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
