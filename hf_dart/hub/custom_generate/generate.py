"""What `model.generate(..., custom_generate="<this repository>", trust_remote_code=True)` runs."""

import hf_dart


def generate(model, assistant=None, tree_config=None, **kwargs):
    """Decode with drafts; all other arguments are those of `generate`, as it was given them."""
    if assistant is None:
        raise ValueError("Pass a drafter: generate(..., assistant=DartHead.from_pretrained(path, target=model)).")
    # A model whose own repository carries this folder would come here again, and for ever.
    kwargs.pop("custom_generate", None)
    given = {name: value for name, value in kwargs.items() if value is not None}
    return hf_dart.generate(model, assistant=assistant, tree_config=tree_config, **given)
