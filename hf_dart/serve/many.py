"""`generate_many`: the texts of many prompts, several at a time, in the order of the prompts."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import count, repeat
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from hf_dart.drafters.base import Drafter
from hf_dart.serve.batcher import MAX_TOKENS, Batcher
from hf_dart.serve.handle import Handle

_WITH_STATE = ("logits_processor", "stopping_criteria")


class ManyFailedError(ExceptionGroup[Exception]):
    """Errors of some prompts of `generate_many`, each with notes that tell which ones.

    Attributes:
        outputs: of all prompts, None where one failed.
    """

    outputs: list[Any]


def generate_many(
    model: PreTrainedModel,
    prompts: Iterable[Any],
    drafter: Drafter[Any] | None = None,
    *,
    progress: bool = True,
    **options: Any,
) -> list[Any]:
    """Return what `model.generate` writes for each of many prompts alone, of which several run at a time.

    Args:
        model, prompts, drafter, progress, options: as for [`iterate_many`], of which `seats` and `seed` are two.

    Returns:
        The outputs in the order of the prompts.

    Raises:
        ManyFailedError: some prompts failed. All others have been run, and their outputs are in its `outputs`.
        Exception: all prompts failed; this is the error of the first.
    """
    outputs: list[Any] = []
    failures: list[Exception] = []
    for place, handle in enumerate(iterate_many(model, prompts, drafter, progress=progress, **options)):
        try:
            outputs.append(handle.result())
        except Exception as failure:
            failure.add_note(f"The error of prompt {place}, counted from 0.")
            outputs.append(None)
            if failure not in failures:  # of a forward that several shared
                failures.append(failure)
    count = sum(output is None for output in outputs)
    if failures and count == len(outputs):
        raise failures[0]
    if failures:
        failed = ManyFailedError(f"{count} of {len(outputs)} prompts failed", failures)
        failed.outputs = outputs
        raise failed
    return outputs


def iterate_many(
    model: PreTrainedModel,
    prompts: Iterable[Any],
    drafter: Drafter[Any] | None = None,
    *,
    seats: int = 8,
    max_tokens: int = MAX_TOKENS,
    seed: int | Iterable[int] | None = None,
    tokenizer: Any = None,
    progress: bool = False,
    **options: Any,
) -> Iterator[Handle]:
    """Run many prompts, several at a time, and yield the [`Handle`] of each when it is done, in their order.

    `handle.result()` is what `model.generate` returns for the prompt alone, or raises its error, by which no other
    prompt is touched.

    Args:
        model: the target.
        prompts: [P] or [1, P] token ids each, or mappings with `input_ids` and `attention_mask` as tokenizers return
            them, or texts. An iterable is asked for a prompt once it may soon run: at most 2 * `seats` are
            ahead of the one that is yielded.
        drafter: drafts for every prompt; None takes the default drafter of an attached model, or drafts nothing.
        seats: prompts that run at a time.
        max_tokens: that those may hold together, as for [`Batcher`].
        seed: of the tokens that are drawn: prompt i, counted from 0, has the text of `torch.manual_seed(seed + i)`. An
            iterable names the seed of each prompt. None chooses them.
        tokenizer: of texts, and of `stop_strings`.
        progress: show a bar, unless transformers' bars are disabled.
        options: those of `generate`, for every prompt. Each has its own copies of processors and criteria.

    Raises:
        TypeError: `prompts` is one text or mapping.
        ValueError: `seed` names fewer seeds than there are prompts.
    """
    if isinstance(prompts, str | Mapping):
        raise TypeError(f"prompts= is one {type(prompts).__name__}; give a list of prompts.")
    seeds = iter(repeat(None) if seed is None else seed if isinstance(seed, Iterable) else count(int(seed)))
    handles: deque[Handle] = deque()

    def done(count: int) -> Iterator[Handle]:
        for _ in range(count):
            handles[0].exception()  # waits for its end
            yield handles.popleft()
            bar.update()

    total = len(prompts) if isinstance(prompts, Sized) else None
    with (
        Batcher(model, drafter, seats=seats, max_tokens=max_tokens) as batcher,
        logging.tqdm(total=total, unit="prompt", disable=not progress) as bar,
    ):
        for prompt in prompts:
            try:
                own_seed = next(seeds)
            except StopIteration:
                raise ValueError("seed= has fewer seeds than there are prompts; give one for each.") from None
            handles.append(_submitted(batcher, prompt, own_seed, tokenizer, options))
            if len(handles) == 2 * seats:
                yield from done(1)
        yield from done(len(handles))


def _submitted(batcher: Batcher, prompt: Any, seed: int | None, tokenizer: Any, options: Mapping[str, Any]) -> Handle:
    """Submit a prompt; where it is refused, return a handle that has failed."""
    try:
        if isinstance(prompt, str):
            if tokenizer is None:
                raise TypeError("A prompt is text, and no tokenizer was given; pass tokenizer=.")
            prompt = tokenizer(prompt, return_tensors="pt").to(batcher.device)
        elif isinstance(prompt, list) and isinstance(next(iter(prompt), None), Mapping):
            raise TypeError(
                "A prompt is messages; give tokenizer.apply_chat_template(messages, add_generation_prompt=True)."
            )
        named = prompt if isinstance(prompt, Mapping) else {"input_ids": prompt}
        own = {name: copy.deepcopy(options[name]) for name in _WITH_STATE if name in options}
        return batcher.submit(**named, seed=seed, tokenizer=tokenizer, **{**options, **own})
    except Exception as refusal:
        handle = Handle(seed or 0)
        handle.end(None, refusal)
        return handle
