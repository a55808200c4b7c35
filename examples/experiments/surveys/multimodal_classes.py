"""Images and sounds for small models of any class that transformers maps, and whether drafts after them are exact.

What shape a class takes, and how many tokens that becomes, is asked of the model itself: of the usual shapes, the first
that its encoder takes; as many tokens as it gives.

    PYTHONPATH=tests:examples/experiments python examples/experiments/surveys/multimodal_classes.py [CLASS ...]

prints rows of the table in `MATRIX.md`.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from support.compare import run
from support.tiny import ReplayDrafter, tiny_head
from surveys.classes import sentence_of_ours, shortened
from surveys.media_by_class import MEDIA, Media
from surveys.small import CannotBuild, build, builds_with, vocabulary_of
from torch import Tensor
from transformers.models.auto import modeling_auto

from hf_dart import attach
from hf_dart.models.stock_steps import extra_inputs

_MAPPINGS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)
_SIDES = (16, 8, 32, 28, 56, 64)
_FRAMES = (64, 32, 128)


def classes_with_media() -> list[str]:
    """Every class that generates text after images or sounds, in transformers' own order."""
    names: dict[str, None] = {}
    for mapping in _MAPPINGS:
        for mapped in getattr(modeling_auto, mapping, {}).values():
            names.update(dict.fromkeys([mapped] if isinstance(mapped, str) else mapped))
    return list(names)


def inputs_of(model: Any) -> Iterator[dict[str, Tensor]]:
    """Two-row prompts with an image each, or a sound, of all shapes that the model's encoders take."""
    for modality in ("image", "audio", "video"):
        encode, token = _encoder_of(model, modality), _token_of(model, modality)
        if encode is None or token is None:
            continue
        for given in _given(model, modality, inspect.signature(encode).parameters):
            try:
                counts = _asked(encode, given)
            except Exception:  # unknown code may fail in any way
                continue
            if counts is not None and all(0 < count < 200 for count in counts):
                yield _prompt(model, token, counts) | given


def inputs_with_media(model: Any, media: Media) -> dict[str, Tensor]:
    """The two-row prompt of a class that has a `Media` of its own.

    Raises:
        Exception: of the model's encoder.
    """
    generator = torch.Generator().manual_seed(0)
    given = {
        name: value if isinstance(value, Tensor) else torch.randn(value, generator=generator).to(model.dtype)
        for name, value in media.given.items()
    }
    modality = "audio" if any(name.startswith("input_") for name in given) else "image"
    counts = [media.count] * 2 if media.count is not None else _asked(_encoder_of(model, modality), given)
    token = media.token or _token_of(model, modality)
    if counts is None or (token is None and any(counts)):
        raise ValueError("it is not said how many tokens these are, or which")
    inputs = _prompt(model, token or 0, counts)
    ids = inputs["input_ids"]
    slots = {
        name: (ids == token).long() if size is None else ids.new_ones(*ids.shape, *size)
        for name, size in media.by_slot.items()
    }
    return inputs | given | slots


def _encoder_of(model: Any, modality: str) -> Any:
    parts = (getattr(model, "model", None), model)
    return next((getattr(part, name) for part in parts if hasattr(part, name := f"get_{modality}_features")), None)


def _asked(encode: Any, given: dict[str, Tensor]) -> list[int] | None:
    """Tokens of each of two rows, as the encoder gives them."""
    takes = inspect.signature(encode).parameters
    with torch.no_grad():
        return _counts(encode(**{name: value for name, value in given.items() if name in takes}))


def _token_of(model: Any, modality: str) -> int | None:
    for name in (f"{modality}_token_id", f"{modality}_token_index", "media_placeholder_token_id"):
        token = getattr(model.config, name, None)
        if isinstance(token, int):
            return token
    return None


def _given(model: Any, modality: str, takes: Any) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(model.dtype)

    if modality == "image":
        for name in ("pixel_values", "pixel_values_images", "image_patches"):
            if name not in takes:
                continue
            if "image_grid_thw" in takes or "image_grid_hws" in takes:
                eyes = model.config.vision_config
                patch, channels = eyes.patch_size, getattr(eyes, "in_channels", getattr(eyes, "in_chans", 3))
                for time in (getattr(eyes, "temporal_patch_size", 1), 1):
                    grid = torch.tensor([[1, 4, 4]] * 2)
                    yield {name: draw(32, channels * time * patch * patch), "image_grid_thw": grid}
                continue
            for side in _SIDES:
                sizes = torch.tensor([[side, side]] * 2)
                yield {name: draw(2, 3, side, side)}
                yield {name: draw(2, 3, side, side), "image_sizes": sizes}
                yield {name: draw(2, 1, 3, side, side)}
                yield {name: draw(2, 1, 3, side, side), "image_sizes": sizes}
                yield {name: draw(2, 2, 3, side, side), "image_sizes": sizes}
    if modality == "audio":
        mels = [16, 128, 80, 64, 32]
        for frames in _FRAMES:
            for bins in mels:
                mask = torch.ones(2, frames, dtype=torch.long)
                for told in ({}, {"input_features_mask": mask}, {"feature_attention_mask": mask}):
                    yield {"input_features": draw(2, bins, frames), **told}
                    yield {"input_features": draw(2, frames, bins), **told}
            yield {"input_values": draw(2, 1, 10 * frames)}
            yield {"input_values": draw(2, 10 * frames)}


def _counts(found: Any) -> list[int] | None:
    """Tokens of each of two rows, of what an encoder returns."""
    for states in (getattr(found, "pooler_output", None), getattr(found, "last_hidden_state", None), found):
        if isinstance(states, (list, tuple)) and len(states) == 2 and all(isinstance(one, Tensor) for one in states):
            return [one.flatten(0, -2).shape[0] for one in states]
        if isinstance(states, Tensor) and states.ndim == 3 and len(states) == 2:
            return [states.shape[1]] * 2
        if isinstance(states, Tensor) and states.ndim == 2 and len(states) % 2 == 0:
            return [len(states) // 2] * 2
        if isinstance(states, Tensor) and states.ndim == 4 and len(states) == 2:
            return [states.shape[1] * states.shape[2]] * 2
    return None


def _prompt(model: Any, token: int, counts: list[int]) -> dict[str, Tensor]:
    words = [torch.arange(5, 5 + before).tolist() for before in (3, 8)]
    texts = [before + [token] * count + [9, 6, 13] for before, count in zip(words, counts, strict=True)]
    width = max(map(len, texts))
    pad = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None) or 0
    ids = torch.tensor([[pad] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    told = {"input_ids": ids, "attention_mask": mask}
    parameters = inspect.signature(model.forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in parameters:
            told[name] = (ids == token).long()
    return told


def _matters(model: Any, inputs: dict[str, Tensor]) -> bool:
    """Are the logits after the prompt others when something else is to be seen?"""
    other = {name: -value if value.is_floating_point() else value for name, value in inputs.items()}
    told: dict[str, Any] = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    first = [run(model, given, 0, do_sample=False, **told).output.logits[0] for given in (inputs, other)]
    return not torch.equal(*first)


def _fails_when_asked(model: Any, inputs: dict[str, Tensor]) -> str:
    """What is wrong with stock's own forward over the prompt that returns hidden states, which heads read."""
    try:
        with torch.no_grad():
            model(**inputs, output_hidden_states=True)
    except Exception as failure:  # unknown code may fail in any way
        return shortened(f"{type(failure).__name__}: {failure}")
    return ""


@dataclass
class Seen:
    """What came of a class: exact with `inputs`, refused in a sentence, or it was not to be run."""

    name: str
    kind: str
    told: str = ""
    tau: float = 0.0


def prompted(name: str) -> Iterator[tuple[Any, dict[str, Tensor]]]:
    """Small models of a class, and prompts that may fit: until stock takes one, both are to be tried.

    Raises:
        CannotBuild: no small model of the class can be made.
        Exception: of the model's encoder, where a `Media` says what to hand to it and no variant takes that.
    """
    media = MEDIA.get(name)
    if media is None:
        model = build(name, "sdpa")
        yield from ((model, inputs) for inputs in inputs_of(model))
        return
    fails: Exception | None = None
    for model in builds_with(name, media.attention, media.own):
        try:
            inputs = inputs_with_media(model, media)
        except Exception as failure:  # unknown code may fail in any way
            fails = fails or failure
            continue
        yield model, inputs
    if fails is not None:
        raise fails


def examine(name: str, tokens: int = 10) -> Seen:
    """Greedy and sampled after images or sounds, held against stock."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fails, refused = "", None
        try:
            for model, inputs in prompted(name):
                seen = _examined(name, model, inputs, tokens)
                if seen.kind == "refused" and "cannot run plain text" in seen.told:
                    refused = refused or seen  # this model, of which another variant may run
                elif seen.kind != "stock fails":
                    return seen
                fails = fails or seen.told
        except CannotBuild as reason:
            return Seen(name, "not built", shortened(str(reason)))
        except Exception as failure:  # unknown code may fail in any way
            fails = fails or shortened(f"{type(failure).__name__}: {failure}")
        return refused or Seen(name, "stock fails", fails or "no shape of ours is taken by its encoder")


def _examined(name: str, model: Any, inputs: dict[str, Tensor], tokens: int) -> Seen:
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens}
    sampled: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": tokens}
    try:
        attach(model)
    except ValueError as refusal:
        return Seen(name, "refused", sentence_of_ours(refusal) or shortened(repr(refusal)))
    try:
        stock = run(model, inputs, 0, **greedy)
        if not _matters(model, inputs):
            return Seen(name, "stock fails", "what is seen does not matter")
        drawn = run(model, inputs, 0, **sampled)
    except Exception as failure:  # unknown code may fail in any way
        return Seen(name, "stock fails", shortened(f"{type(failure).__name__}: {failure}"))
    try:
        pads = (1 - inputs["attention_mask"]).sum(1).tolist()
        known = ReplayDrafter(stock.sequences, pads, vocabulary_of(model), misses=[0.1, 0.4])
        ours = run(model, inputs, 0, **greedy, assistant=known)
        head = tiny_head(model, feature_layers=[0, 1])
        drafted = run(model, inputs, 0, **sampled, assistant=head)
    except Exception as failure:
        told = sentence_of_ours(failure)
        if told is None and (fails := _fails_when_asked(model, inputs)):
            return Seen(name, "stock fails", f"when it is asked for hidden states: {fails}")
        return Seen(name, "crash" if told is None else "refused", told or shortened(repr(failure)))
    same = torch.equal(stock.sequences, ours.sequences) and torch.equal(drawn.sequences, drafted.sequences)
    same = same and torch.equal(drawn.state, drafted.state)
    given = ", ".join(f"{key} {list(inputs[key].shape)}" for key in extra_inputs(model, inputs) if "type" not in key)
    return Seen(name, "exact" if same else "wrong", given, known.last_stats.tau)


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for each in sys.argv[1:] or classes_with_media():
        seen = examine(each)
        tau = f"{seen.tau:.2f}" if seen.kind == "exact" else ""
        print(f"| {seen.name} | {seen.kind} | {seen.told.replace('|', '/')} | {tau} |", flush=True)
