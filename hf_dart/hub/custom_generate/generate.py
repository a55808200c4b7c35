"""Code that `model.generate(..., custom_generate="<this folder or repository>", trust_remote_code=True)` runs."""

import inspect
import re
import sys
from pathlib import Path

from transformers import GenerationMixin

import hf_dart
from hf_dart.hub.download import HUB_OPTIONS

_HANDED_ON = inspect.signature(GenerationMixin.generate).parameters  # by transformers, None where not given


def generate(model, assistant=None, tree_config=None, **kwargs):
    """Decode with drafts; all other arguments are those of `generate`, as it was given them."""
    where = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}  # of this folder
    if assistant is None:
        # transformers runs a copy of this file, one for all folders of the same name, and hands on neither the place
        # of the original nor `custom_generate`; only its own frame has it.
        caller = sys._getframe(1).f_locals
        place = caller.get("custom_generate") if caller.get("self") is model else None
        if place is None:
            raise ValueError("Pass a drafter: generate(..., assistant=DartHead.from_pretrained(path, target=model)).")
        commit = Path(__file__).parents[1].name  # where transformers keeps a file of the Hub
        if re.fullmatch("[0-9a-f]{40}", commit):
            where["revision"] = commit
        assistant = hf_dart.load_once(place, model, **where)
    # A model whose own repository has this folder would call this function without end.
    kwargs.pop("custom_generate", None)
    # What else is None overrides the model's own setting, such as `eos_token_id=None`.
    given = {name: value for name, value in kwargs.items() if value is not None or name not in _HANDED_ON}
    return hf_dart.generate(model, assistant=assistant, tree_config=tree_config, **given)
