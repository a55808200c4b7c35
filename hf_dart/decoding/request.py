"""`Request`: one call of `generate` as its rounds see it; `admit` reads its options, or refuses.

What cannot be exact is refused with one sentence that names the remedy; nothing has run by then but the trial of a
target that is new (`hf_dart.models.trial`).
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, MaxLengthCriteria, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache, StaticLayer
from transformers.generation import GenerationMode
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from hf_dart.cache.stock_layers import attention_layers, keeps_states, slots_of
from hf_dart.decoding.pace import Pace
from hf_dart.decoding.processors import needs_stocks_steps, refuse_grammars
from hf_dart.decoding.suffix_store import Namespace, namespace_of
from hf_dart.drafters.base import Drafter
from hf_dart.models.devices import device_of
from hf_dart.models.packed_weights import pack
from hf_dart.models.positions import refuse_crossing
from hf_dart.models.processes import alone, is_shared, refuse_different_calls
from hf_dart.models.running_states.mixers import takes_levels
from hf_dart.models.stock_steps import cache_name, extra_inputs, refuse_marks
from hf_dart.models.support import drops_out, refuse_cache, refuse_target, with_row_adapters
from hf_dart.models.trial import check_verification
from hf_dart.models.verify import layer_windows
from hf_dart.trees.config import TreeConfig

# Options that ask `generate` for other modes than greedy search and sampling, as they are where they do not.
_OTHER_MODES = {"num_beams": 1, **dict.fromkeys((
    "constraints", "force_words_ids", "penalty_alpha", "dola_layers", "prompt_lookup_num_tokens",
    "assistant_early_exit", "use_mtp",
))}  # fmt: skip
# Those that tokens are chosen by.
_CHOOSING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_PREPARING = RLock()  # calls that begin at once would each pack the weights and try the target

FILL = 64  # tokens fed at once when rows that ended early are filled up for a cache that is handed back


@dataclass(frozen=True)
class Request:
    """One call of `generate` that drafts can serve exactly, as stock prepared it; nothing in it changes."""

    model: PreTrainedModel  # the target
    drafter: Drafter[Any]  # what drafts
    tree_config: TreeConfig  # how trees grow in this call, its `draft_cost` known
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    generation_config: Any
    model_kwargs: Mapping[str, Any]  # the prepared keyword arguments of the target's forward, its cache among them
    device: torch.device  # that the target reads tokens on; prompts may lie elsewhere
    input_ids: Tensor  # [B, P] left-padded prompts
    prompt: Tensor  # the same, or their embeddings [B, P', E]
    pads: list[int]  # left padding of each row
    cached: int  # slots of the text that the cache holds already
    total: int  # slots of the prompts, the cached ones included
    most: int  # slots of the prompts and of all tokens that may be generated
    max_length: int  # tokens that a row may have, the P of `input_ids` included
    multimodal: bool  # the prompt has more than text, such as images or sounds; text in the cache does not count
    streamer: Any  # is told of every token; None for none
    in_step: bool  # all rows go position by position, as stock's do, because processors or criteria may do anything
    traced: bool  # keep every round and its tree in the statistics
    windowed: bool  # layers with a sliding window may drop what has left it; else the cache holds the whole text
    timed: Collection[str]  # fields of `tree_config` that are estimates, for measured times (`Pace.timed_costs`)
    memory: Namespace | None = None  # texts of earlier calls (`decoding.suffix_store`); None for none
    pause: Callable[[Any], None] | None = None  # called with the `PromptReader` between two pieces of the prompt
    observers: tuple[Any, ...] = ()  # `decoding.session.Observer`s of this call, beside those of its drafter

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
        """True if the user passed the cache in."""
        return bool(getattr(self.stock_cache, "_is_user_defined", False))

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """Key of the calls whose rounds cost the same (first part), and whose drafts are accepted about as often."""
        config = self.generation_config
        rounds = id(self.model), self.tree_config, len(self.input_ids)  # weak references could not be pickled
        return rounds, *(getattr(config, name) for name in _CHOOSING)

    @property
    def returns_cache(self) -> bool:
        """True if the cache is read after the call."""
        return bool(self.generation_config.return_dict_in_generate) or self.users_cache

    def collects(self, name: str) -> bool:
        """Return True if the call returns what "output_scores", "output_logits" or "output_hidden_states" names."""
        config = self.generation_config
        return bool(config.return_dict_in_generate and getattr(config, name))


def admit(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    assistant: Drafter[Any],
    tree_config: TreeConfig | None = None,
    refine: int | None = None,
    trace: bool | None = None,
    memory: Any = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    overlaps: bool = False,
    **model_kwargs: Any,
) -> Request:
    """Return a call as a `Request`, from what stock's `generate` hands a callable, and the keywords of `api.generate`.

    A call that `overlaps` another one takes the target's packed weights as that one found them.
    """
    tree_config = assistant.tree_config if tree_config is None else tree_config
    if not isinstance(tree_config, TreeConfig):
        raise TypeError(f"tree_config= takes a TreeConfig, not {tree_config!r:.100}; give TreeConfig(nodes=8), say.")
    if refine is not None:
        tree_config = replace(tree_config, refine=refine)
    if tree_config.refine and not assistant.refines:
        raise ValueError(
            f"This {type(assistant).__name__} does not refine its drafts; give refine=0, or a head that was trained "
            "with an editor (a DiffusionDrafter has denoise_steps)."
        )
    refuse_target(model)
    refuse_different_calls(model, input_ids, generation_config, tree_config)
    refuse_options(model, generation_config, input_ids, synced_gpus, model_kwargs)
    refuse_marks(model, model_kwargs)
    refuse_grammars(logits_processor, model, len(input_ids))
    if isinstance(assistant, nn.Module) and drops_out(assistant):
        raise ValueError(
            "The drafter is in train mode, where dropout moves the generator that tokens are drawn from; call its "
            "eval() first."
        )
    assistant.check_target(model)
    remembered = namespace_of(memory)
    if remembered is not None:
        remembered.check_target(model)
        if is_shared(model):
            raise ValueError("Processes that hold a target together may remember different texts; leave memory= out.")
    input_ids = input_ids.long()  # as stock's are once a token is added
    width = input_ids.shape[1]
    # A user's `MaxLengthCriteria` replaces the one that `generate` adds; subclasses are applied in addition.
    lengths = [one.max_length for one in stopping_criteria if type(one) is MaxLengthCriteria]
    # The criterion's limit, rounded up to whole tokens; stock too writes at least one.
    max_length = max(math.ceil(min(*lengths, sys.maxsize)), width + 1)
    mask, embeddings = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    prompt = input_ids if embeddings is None else embeddings
    total = max(prompt.shape[1], getattr(generation_config, "_mask_length", 0) if mask is None else mask.shape[1])
    most = total + max_length - width
    stock = refuse_cache(model_kwargs.get(cache_name(model)))
    pads = left_padding(mask, total, len(input_ids))
    cached = slots_of(stock)
    refuse_crossing(model, total - min(pads), cached, most)
    refuse_cache_length(stock, layer_windows(model, stock), cached, total - prompt.shape[1], total, most - 1)
    stateful = any(map(keeps_states, stock.layers))
    if stateful and any(with_row_adapters(model)):
        raise ValueError(
            "Drafts cannot follow an adapter for each row (adapter_names=) of a target with running states; call "
            "generate for the rows of one adapter at a time, or leave assistant= out."
        )
    # Nothing of the target has run until here.
    with _PREPARING:
        if not overlaps:
            pack(model, assistant)
        check_verification(model, most, max(tree_config.nodes or 0, FILL), len(input_ids), any(pads))
    levels, device = stateful and takes_levels(model), device_of(model.get_input_embeddings())
    # Processes that share a target would measure different costs, and verify different trees.
    timed = frozenset() if is_shared(model) else Pace.timed_costs(tree_config, device.type)
    tree_config = tree_config.for_levels(levels)
    if tree_config.draft_cost is None:
        depth = tree_config.resolve_depth(assistant.draft_length)
        tree_config = replace(tree_config, draft_cost=assistant.draft_cost(model, depth))
    if assistant.engine is None and model._valid_auto_compile_criteria(model_kwargs, generation_config):
        warnings.warn(
            "generate would compile the target for this static cache; drafted rounds run it eagerly, unless "
            "hf_dart.compile(model, head) was called.",
            stacklevel=2,
        )
    return Request(
        model=model,
        drafter=assistant,
        tree_config=tree_config,
        processors=logits_processor,
        criteria=stopping_criteria,
        generation_config=generation_config,
        model_kwargs=model_kwargs,
        device=device,
        input_ids=input_ids,
        prompt=prompt,
        pads=pads,
        cached=cached,
        total=total,
        most=most,
        max_length=max_length,
        multimodal=bool(extra_inputs(model, model_kwargs)),
        streamer=streamer,
        in_step=needs_stocks_steps(logits_processor, stopping_criteria, streamer, generation_config),
        traced=bool(trace),
        windowed=assistant.engine is None,
        timed=timed,
        memory=remembered,
    )


def refuse_options(
    model: PreTrainedModel, generation_config: Any, input_ids: Tensor, synced_gpus: bool, kwargs: dict[str, Any]
) -> None:
    """Raise for options of `generate` whose result a drafted run could not equal."""
    config = generation_config
    mode = config.get_generation_mode()
    # Processes that hold parts of the model would be kept in step by stock.
    sharded = not alone() and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        remedy = [f"{name}={off}" for name, off in _OTHER_MODES.items() if getattr(config, name, off) != off]
        raise ValueError(
            f"Drafts serve greedy search and sampling, not {mode.value}; pass {' and '.join(remedy)}, or leave "
            "assistant= out."
        )
    named = [
        (not config.use_cache, f"use_cache={config.use_cache}", "use_cache=True"),
        (bool(config.is_assistant), "is_assistant=True", "is_assistant=False"),
        (bool(config.output_attentions), "output_attentions=True", "output_attentions=False"),
        (isinstance(config.output_hidden_states, list), "output_hidden_states=[...]", "output_hidden_states=True"),
        (isinstance(kwargs.get("logits_to_keep"), Tensor), "logits_to_keep=tensor(...)", "a number"),
        (synced_gpus or sharded, "synced_gpus (FSDP or ZeRO-3 generation)", "a model that is whole on each process"),
    ]
    for refused, option, instead in named:
        if refused:
            raise ValueError(f"{option} cannot be drafted exactly; use {instead}, or leave assistant= out.")
    # Soft prompts have no token ids; a wrapper of PEFT is found by what its `generate` overrides.
    wrapper = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    adapter = getattr(wrapper, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise ValueError(
            f"{type(adapter).__name__} puts soft prompts before the text, which no head was trained on; call generate "
            "without assistant=."
        )
    _refuse_shapes(input_ids, kwargs.get("inputs_embeds"), kwargs.get("attention_mask"))


def _refuse_shapes(input_ids: Tensor, embeddings: Tensor | None, mask: Tensor | None) -> None:
    """Raise for what is no prompt, and for parts that are not of one."""
    prompt = input_ids if embeddings is None else embeddings
    rows, dimensions = len(input_ids), 2 if embeddings is None else 3
    if input_ids.ndim != 2 or prompt.ndim != dimensions or len(prompt) != rows:
        raise ValueError(
            f"A prompt of shape {list(prompt.shape)} is no batch of {rows} rows; give input_ids [rows, tokens] or "
            "inputs_embeds [rows, tokens, width]."
        )
    if 0 in prompt.shape[:2]:
        raise ValueError("The prompt is empty; give at least one row of at least one token.")
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"Token ids cannot be {input_ids.dtype}; pass input_ids.long().")
    if mask is not None and (mask.ndim != 2 or len(mask) != rows or mask.shape[1] < prompt.shape[1]):
        raise ValueError(
            f"An attention mask of shape {list(mask.shape)} does not fit a prompt of {rows} rows and "
            f"{prompt.shape[1]} tokens; give it one entry for each, and for each that is in the cache."
        )


def refuse_cache_length(
    cache: Cache, windows: list[int | None], cached: int, first: int, total: int, slots: int
) -> None:
    """Raise for a cache that does not fit the prompt, or is too short for the answer.

    Stock would feed the prompt twice, leave a gap, or run over the end of a static cache (unless all rows ended). Of
    `total` slots of the text `cached` ones are in the cache, and tokens are passed from slot `first` on; the call may
    need so many `slots`.
    """
    if first > 0 == cached:
        raise ValueError(
            f"The attention mask has {total} entries for a prompt of {total - first} tokens and nothing is cached; "
            "give it one for each token."
        )
    if cached >= total:
        raise ValueError(
            f"The cache holds {cached} tokens and the prompt has {total}, but the target has to run over the last one; "
            "add new tokens to the prompt, or pass the whole text with an empty cache."
        )
    if first not in (0, cached):
        raise ValueError(
            f"The cache holds {cached} tokens and input_ids begin at token {first}; pass the whole text, or all that "
            "the cache does not hold."
        )
    rooms = [
        layer.max_cache_len
        for layer, window in zip(attention_layers(cache), windows, strict=True)
        # One that is shorter than the window of its layer would be another window.
        if isinstance(layer, StaticLayer) and (not layer.is_sliding or window is None or layer.max_cache_len < window)
    ]
    if rooms and min(rooms) < slots:
        raise ValueError(
            f"This StaticCache has room for {min(rooms)} tokens and this call may need {slots}; pass a longer one or a "
            "smaller max_new_tokens."
        )


def left_padding(attention_mask: Tensor | None, total: int, batch_size: int) -> list[int]:
    """Return the number of pads in front of each row, by a mask [B, total]; raise if it hides other slots, or all."""
    if attention_mask is None:
        return [0] * batch_size
    seen = attention_mask.bool()
    if bool((seen[:, :-1] & ~seen[:, 1:]).any()):
        raise ValueError(
            "The attention mask hides tokens after visible ones; pad on the left (tokenizer.padding_side='left')."
        )
    pads = (~seen).sum(-1).tolist()
    if total in pads:
        raise ValueError("A row of the batch is all padding; give every row at least one token.")
    return pads
