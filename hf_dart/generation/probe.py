"""Proof by trial: a random tree through the target, held against its own plain forward."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_dart.generation.cache import tree_cache
from hf_dart.generation.options import refuse_cache, refuse_model
from hf_dart.generation.verify import Verifier, mask_kinds
from hf_dart.tree import DraftTree

_PROMPT = 12
# A tree with siblings on every level and a path of depth 3: node 0 is the root.
_PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]
_PATHS = ([0, 1, 3, 6], [0, 2, 5, 7], [0, 1, 4])

# Models (with attention choice and dtype) that were proved right in this process.
_proved: WeakKeyDictionary[Any, set[tuple[str, torch.dtype]]] = WeakKeyDictionary()


@torch.no_grad()
def prove(model: Any) -> None:
    """Check once per model, attention and dtype that tree verification is right for it.

    Runs an 8-node tree on 12 random tokens, commits one path, runs one more token, and compares all logits
    with plain forwards. What a plain forward itself differs by when it is cut in two sets the tolerance.
    The global generators are not moved.

    Raises:
        ValueError: the target computes something else for a tree; it is not supported.
    """
    refuse_model(model)
    case = (model.config.get_text_config(decoder=True)._attn_implementation, model.dtype)
    if case in _proved.setdefault(model, set()):
        return
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocabulary, (1, _PROMPT + len(_PARENTS) + 1), generator=generator)
    tokens = tokens.to(model.get_input_embeddings().weight.device)
    try:
        error, whole, plain = _tree_against_plain(model, *tokens.split([_PROMPT, len(_PARENTS), 1], dim=1))
    except (RuntimeError, TypeError, IndexError, ValueError) as failure:
        raise ValueError(
            f"{type(model).__name__} cannot run a token tree ({failure}); call generate without assistant=."
        ) from failure
    # Some families compute parts in fp32 whatever their dtype.
    rounding = 64 * max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    tolerance = 8 * _chunking_difference(model, whole, plain) + rounding * float(plain.abs().max())
    if not error <= tolerance:
        raise ValueError(
            f"{type(model).__name__} computes something else for a token tree than for plain text (logits differ by "
            f"{error:.2g}, allowed {tolerance:.2g}); it is not supported, call generate without assistant=."
        )
    _proved[model].add(case)


def _tree_against_plain(model: Any, prompt: Tensor, nodes: Tensor, after: Tensor) -> tuple[float, Tensor, Tensor]:
    """The largest difference of a logit, the last text that was compared, and its plain logits."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    prefilled = refuse_cache(model(input_ids=prompt, past_key_values=cache, use_cache=True).past_key_values)
    kinds = mask_kinds(model, prefilled)
    trees = tree_cache(prefilled, [0], _PROMPT + 2 * len(_PARENTS), keep=False)
    verify = Verifier(model, trees, kinds, [])
    parents = torch.tensor([_PARENTS], device=nodes.device)
    logits, _ = verify(DraftTree.from_parents(nodes, parents, max_depth=len(_PARENTS)))
    error = 0.0
    for path in _PATHS:
        plain = _plain(model, torch.cat([prompt, nodes[:, path]], dim=1))
        error = max(error, _difference(logits[:, path], plain[:, _PROMPT:]))
    kept = _PATHS[0]
    trees.commit(torch.tensor([kept]), [len(kept)])
    logits, _ = verify(DraftTree.chain(after))
    whole = torch.cat([prompt, nodes[:, kept], after], dim=1)
    plain = _plain(model, whole)
    error = max(error, _difference(logits[:, -1], plain[:, -1]))
    return error, whole, plain


def _plain(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits


def _chunking_difference(model: Any, tokens: Tensor, plain: Tensor) -> float:
    """What the model's own logits change by when the text is fed in two pieces."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    model(input_ids=tokens[:, :_PROMPT], past_key_values=cache, use_cache=True)
    rest = model(input_ids=tokens[:, _PROMPT:], past_key_values=cache, use_cache=True).logits
    return _difference(rest, plain[:, _PROMPT:])


def _difference(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).abs().max())
