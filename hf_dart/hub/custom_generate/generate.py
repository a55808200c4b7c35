"""What `model.generate(..., custom_generate="<this repository>", trust_remote_code=True)` runs."""

import re
from pathlib import Path

import hf_dart

REPOSITORY = None  # whose drafter is loaded if the call brings none; `push` writes its name here


def generate(model, assistant=None, tree_config=None, **kwargs):
    """Decode with drafts; all other arguments are those of `generate`, as it was given them."""
    if assistant is None:
        if REPOSITORY is None:
            raise ValueError("Pass a drafter: generate(..., assistant=DartHead.from_pretrained(path, target=model)).")
        commit = Path(__file__).parents[1].name  # where transformers keeps this file
        revision = commit if re.fullmatch("[0-9a-f]{40}", commit) else None
        assistant = hf_dart.load_once(REPOSITORY, model, revision=revision, token=kwargs.get("token"))
    # A model whose own repository carries this folder would come here again, and for ever.
    kwargs.pop("custom_generate", None)
    given = {name: value for name, value in kwargs.items() if value is not None}
    return hf_dart.generate(model, assistant=assistant, tree_config=tree_config, **given)
