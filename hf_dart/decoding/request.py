"""`Request`: one call of `generate` as its rounds see it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache

from hf_dart.drafters.base import Drafter
from hf_dart.models.stock_steps import cache_name
from hf_dart.trees.config import TreeConfig

_CHOOSING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Request:
    """One call of `generate` that drafts can serve exactly, as stock prepared it; nothing in it changes.

    Attributes:
        model: the target.
        drafter: what drafts.
        tree_config: how trees grow in this call, its `draft_cost` known.
        processors, criteria, generation_config: of the call.
        model_kwargs: the prepared keyword arguments of the target's forward, its cache among them.
        input_ids: [B, P] left-padded prompts.
        prompt: the same, or their embeddings [B, P', E].
        pads: left padding of each row.
        cached: slots of the text that the cache holds already.
        total: slots of the prompts, the cached ones included.
        most: slots of the prompts and of all tokens that may be generated.
        max_length: tokens that a row may have, the P of `input_ids` included.
        sees: there is more than text in it, as images and sounds are; of text in the cache it says nothing.
        in_step: all rows go position by position, as stock's do, because processors or criteria may do anything.
        traced: keep every round and its tree in the statistics.
        timed: fields of `tree_config` that are estimates, to be replaced by measured times (`Pace.timed_costs`).
    """

    model: PreTrainedModel
    drafter: Drafter[Any]
    tree_config: TreeConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    generation_config: Any
    model_kwargs: Mapping[str, Any]
    input_ids: Tensor
    prompt: Tensor
    pads: list[int]
    cached: int
    total: int
    most: int
    max_length: int
    sees: bool
    in_step: bool
    traced: bool
    timed: Collection[str]

    @property
    def first_slot(self) -> int:
        """The slot of the first token of `input_ids`."""
        return self.total - self.input_ids.shape[1]

    @property
    def stock_cache(self) -> Cache:
        """The cache that stock made for the call, or that the user passed in."""
        return self.model_kwargs[cache_name(self.model)]

    @property
    def users_cache(self) -> bool:
        """Did the user pass the cache in?"""
        return bool(getattr(self.stock_cache, "_is_user_defined", False))

    @property
    def kind(self) -> Hashable:
        """What calls have in common whose drafts are about as often right, as far as their arguments tell."""
        config = self.generation_config
        return self.tree_config, len(self.input_ids), *(getattr(config, name) for name in _CHOOSING)

    @property
    def returns_cache(self) -> bool:
        """Will anybody look at the cache after the call?"""
        return bool(self.generation_config.return_dict_in_generate) or self.users_cache

    def collects(self, name: str) -> bool:
        """Does the call return what "output_scores", "output_logits" or "output_hidden_states" names?"""
        config = self.generation_config
        return bool(config.return_dict_in_generate and getattr(config, name))
