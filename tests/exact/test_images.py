"""Texts with images: stock's prefill reads them, and drafts are verified at the positions that come after them."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import cpu_offload
from support.cases import GREEDY, SAMPLED, replay
from support.compare import Run, assert_identical, run, same, tally
from support.engines import engine
from support.families import needs_running_states
from support.modules import with_module
from support.multimodal import MULTIMODAL, TEXT, after_images, image_inputs, multimodal_target
from support.sentences import refused
from support.tiny import VOCABULARY, prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target
from surveys.small import build
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LlavaProcessor, PreTrainedTokenizerFast
from transformers.cache_utils import Cache

from hf_dart import Batcher, LanguageModelDrafter, LookupDrafter, MtpDrafter, attach
from hf_dart.models.stock_steps import CACHE
from hf_dart.serve import batcher as batcher_module
from hf_dart.serve import prefixes as prefixes_module

SEEN = tally("float64, with images")
WORDS = {"suppress_tokens": [43, 44, 45, 46, 47]}  # no image's tokens, of which another turn would want the image

# Images in chunks, and `image_sizes` with CLIP, are beyond older releases themselves.
_stock_can = pytest.mark.skipif(not hasattr(Cache, "get_conv_state"), reason="stock cannot, in this release")
MORE = ("qwen3_vl", "llava", "gemma3")
_FAMILIES = [pytest.param(one, marks=needs_running_states if one == "qwen3_5" else ()) for one in MULTIMODAL]


@pytest.mark.parametrize("family", _FAMILIES)
def test_two_rows_with_images(family: str) -> None:
    target, inputs = multimodal_target(family), image_inputs(family)
    drafter = replay(target, inputs, misses=[0.1, 0.4], **GREEDY)
    blind = run(target, {**inputs, "pixel_values": torch.zeros_like(inputs["pixel_values"])}, 0, **GREEDY)
    assert not torch.equal(blind.sequences, drafter.sequences), "images were to matter"
    assert_identical(target, drafter, inputs, into=SEEN, **GREEDY)
    assert drafter.last_stats.tau > 2
    head = tiny_head(target)
    assert_identical(target, head, inputs, into=SEEN, **SAMPLED)
    assert head.last_stats.tau > 1.3


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_requests_at_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of text after images of two sizes, and of text alone, which write what they write alone.

    Whatever is read in pieces, or shared where prompts begin alike: images may differ where no token does.
    """
    for module, name in (batcher_module, "PIECE"), (prefixes_module, "_LEAST"):
        monkeypatch.setattr(module, name, 4)
    target = multimodal_target(family)
    asked = [image_inputs(family, 1, turned=turned) for turned in (False, True)]
    asked.insert(1, {"input_ids": torch.tensor([[9, 8, 7, 6, 5]])})
    asked.append(image_inputs(family, 1, seed=4))
    asked += [image_inputs(family, 1, image=image) for image in (1, 2)]
    told = {**SAMPLED, "return_dict_in_generate": True, "output_logits": True}  # which show each position
    stock = [run(target, inputs, number, **told) for number, inputs in enumerate(asked)]
    attach(target)
    with Batcher(target, seats=3, drafter=tiny_head(target)) as batcher:
        handles = [batcher.submit(**inputs, seed=number, **told) for number, inputs in enumerate(asked)]
        for handle, wanted in zip(handles, stock, strict=True):
            same(Run(handle.result(), wanted.state), wanted)


def test_a_prefix_that_blank_marks_name_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """PaliGemma's tokens of type 0 see each other, those of text too."""
    monkeypatch.setattr(batcher_module, "PIECE", 16)
    target, ids = build("PaliGemmaForConditionalGeneration", "sdpa"), prompts([64])["input_ids"]
    told = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), **GREEDY}
    with Batcher(target, drafter=LookupDrafter()) as batcher:
        assert torch.equal(batcher.submit(**told).result(), target.generate(**told))


@pytest.mark.parametrize("family", [pytest.param("qwen2_5_vl", marks=_stock_can), "gemma3"])
def test_one_row_in_chunks(family: str) -> None:
    target, inputs = multimodal_target(family), image_inputs(family, rows=1)
    assert_identical(target, replay(target, inputs, misses=[0.1], **GREEDY), inputs, into=SEEN, **GREEDY)
    if family == "qwen2_5_vl":  # masks of gemma3 let an image's tokens see each other, across chunks too
        assert_identical(target, tiny_head(target), inputs, into=SEEN, **GREEDY, prefill_chunk_size=5)


def peagle_head(target: Any) -> Any:
    return tiny_head(target, mask_mode="peagle", mask_token_id=1, num_layers=2)


def small_model(target: Any) -> LanguageModelDrafter:
    """Of another family, which sees nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fields = {**TEXT, "num_hidden_layers": 1}
        return LanguageModelDrafter(LlamaForCausalLM(LlamaConfig(**fields)).double().eval(), target)


@pytest.mark.parametrize("make", [tiny_head, peagle_head, tiny_eagle_drafter, tiny_diffusion_drafter])
def test_drafters_read_what_the_target_reads(make: Any, noted: Any) -> None:
    """The embeddings of images in place of their tokens' own, and of text those that they know."""
    target, inputs = multimodal_target("llava"), image_inputs("llava")
    drafter = make(target)
    read = noted(type(drafter), "extend", lambda _, state, features, next_tokens, counts: (next_tokens, counts))
    assert_identical(target, drafter, inputs, **GREEDY)
    tokens, counts = read[0]
    with torch.no_grad():
        images = target.model.get_image_features(inputs["pixel_values"]).pooler_output
    for row, ids in enumerate(inputs["input_ids"]):
        text = ids[ids > 0][1:]
        wanted = target.get_input_embeddings()(text).detach().clone()
        wanted[text == 47] = images[row]
        assert counts[row] == len(text)
        torch.testing.assert_close(tokens[row, : len(text)], wanted, rtol=0, atol=0)


def test_reading_embeddings_is_for_those_that_can(noted: Any) -> None:
    """A drafter gets ids unless it says otherwise."""
    target, inputs = multimodal_target("llava"), image_inputs("llava")
    drafter = replay(target, inputs, misses=[0.1, 0.1], **GREEDY)
    assert not drafter.reads_embeddings
    read = noted(type(drafter), "extend", lambda _, state, features, next_tokens, counts: next_tokens.dtype)
    target.generate(**inputs, **GREEDY, assistant=drafter)
    assert read[0] == torch.long


@pytest.mark.parametrize("make", [peagle_head, tiny_eagle_drafter, tiny_diffusion_drafter, small_model])
@pytest.mark.parametrize("family", ["qwen2_5_vl", *(pytest.param(one, marks=pytest.mark.matrix) for one in MORE)])
def test_every_kind_of_drafter(family: str, make: Any) -> None:
    target = multimodal_target(family)
    drafter = make(target)
    for mode in (GREEDY, SAMPLED):
        assert_identical(target, drafter, image_inputs(family), into=SEEN, **mode)
    text = {name: image_inputs(family)[name] % 43 for name in ("input_ids", "attention_mask")}
    assert_identical(target, drafter, text, into=SEEN, **GREEDY)


@pytest.mark.parametrize("make", [tiny_eagle_drafter, lambda target: tiny_head(target, selector_rank=4)])
def test_ids_that_have_no_logit(make: Any) -> None:
    """As the images of Molmo2 have, whose LM head is shorter than its embeddings: they are read, and never copied."""
    target = attach(tiny_target("llama"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target.set_input_embeddings(torch.nn.Embedding(VOCABULARY + 2, 32, dtype=torch.float64))
    drafter, text = make(target), torch.arange(3, 43)
    ids = torch.stack([text, VOCABULARY + text % 2], dim=1).view(1, -1)  # whatever is written, one came after it
    for mode in (GREEDY, SAMPLED, {**SAMPLED, "repetition_penalty": 1.3}):
        assert_identical(target, drafter, {"input_ids": ids}, **mode)


@needs_running_states
def test_a_module_of_the_targets_own(tmp_path: Path) -> None:
    """MTP, as the checkpoints of Qwen3.5 have it, reads the embeddings of images too."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]  # its norms are those of a layer of attention
    target, _ = with_module("qwen3_5", tmp_path, target=multimodal_target("qwen3_5", layer_types=kinds))
    drafter = MtpDrafter.from_target(attach(target))
    assert drafter.reads_embeddings
    for mode in (GREEDY, SAMPLED):
        assert_identical(target, drafter, image_inputs("qwen3_5"), into=SEEN, **mode)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_turns_with_an_image_each(family: str, taken_up: list[bool]) -> None:
    target = multimodal_target(family)
    head, texts = tiny_head(target), []
    for drafting in ({}, {"assistant": head}):
        inputs, cache = image_inputs(family), DynamicCache(config=target.config.get_text_config())
        for turn in range(3):
            out = run(target, inputs, turn, **{CACHE: cache}, **SAMPLED, **WORDS, **drafting)
            texts.append(out.sequences)
            inputs = after_images(family, inputs, out.sequences, with_image=turn == 0)
    assert all(torch.equal(stock, ours) for stock, ours in zip(texts[:3], texts[3:], strict=True))
    assert taken_up == [False, True, True]


@pytest.mark.parametrize("words", [False, True], ids=["at once", "after a turn of words"])
def test_other_images_are_another_text(words: bool, taken_up: list[bool]) -> None:
    """The head starts over where the cache is not the one that it left: the tokens of both texts are the same."""
    target = multimodal_target("llava")
    head, one, other = tiny_head(target), image_inputs("llava"), image_inputs("llava", seed=0, image=1)
    assert torch.equal(one["input_ids"], other["input_ids"])
    assert not torch.equal(one["pixel_values"], other["pixel_values"])
    cache = DynamicCache(config=target.config.get_text_config())
    text = run(target, one, 0, **{CACHE: cache}, assistant=head, **GREEDY, **WORDS).sequences
    if words:
        more = after_images("llava", one, text)
        text = run(target, more, 0, **{CACHE: cache}, assistant=head, **GREEDY, **WORDS).sequences
    # Stock reads the other one, up to where the head left its state.
    inputs = {**other, "input_ids": text[:, :-1]}
    inputs["attention_mask"] = after_images("llava", one, inputs["input_ids"], more=0)["attention_mask"]
    cache.layers = target(**inputs, use_cache=True)[CACHE].layers
    more = {name: value for name, value in inputs.items() if name != "pixel_values"}
    more["input_ids"] = text
    more["attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    assert cache.get_seq_length() == text.shape[1] - 1
    run(target, more, 0, **{CACHE: cache}, assistant=head, **GREEDY)
    assert taken_up == [False, *[True] * words, False]


def test_positions_of_the_users_own_are_followed() -> None:
    target = multimodal_target("qwen2_5_vl")
    head, inputs = tiny_head(target), image_inputs("qwen2_5_vl")
    width = inputs["input_ids"].shape[1]
    positions = torch.arange(width).expand(4, 2, width) + torch.tensor([0, 1, 5, 2])[:, None, None]
    plain = run(target, inputs, 0, **GREEDY)
    stock, _ = assert_identical(target, head, {**inputs, "position_ids": positions}, into=SEEN, **GREEDY)
    assert not torch.equal(plain.sequences, stock.sequences), "positions were to matter"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_captured_rounds_after_images(family: str) -> None:
    """The next call's images are of other sizes, and a text without any is at its own positions."""
    target = multimodal_target(family)
    head = tiny_head(target)
    made = engine(target, head)
    inputs = image_inputs(family)
    assert_identical(target, head, inputs, into=SEEN, **GREEDY)
    turned = image_inputs(family, turned=True)
    assert_identical(target, head, turned, into=SEEN, **SAMPLED)
    assert_identical(target, head, turned, into=SEEN, **GREEDY)
    assert_identical(target, head, turned, into=SEEN, **GREEDY, no_repeat_ngram_size=3)
    text = {name: inputs[name] % 43 for name in ("input_ids", "attention_mask")}
    assert_identical(target, head, text, into=SEEN, **GREEDY)
    assert all(made.tiers)


@_stock_can
def test_what_stock_hands_on_with_every_token_is_no_matter_or_refused() -> None:
    plain = type(multimodal_target("llava"))

    class Sees(plain):  # type: ignore[misc, valid-type]
        sizes: Any = None
        looks = False

        @wraps(plain.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            if kwargs.get("image_sizes") is not None and self.looks:
                outputs.logits = outputs.logits + torch.arange(VOCABULARY) / 64
            return outputs

        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
            return {**super().prepare_inputs_for_generation(*args, **kwargs), "image_sizes": self.sizes}

    target = multimodal_target("llava")
    target.__class__ = Sees
    head, inputs = tiny_head(target), image_inputs("llava")
    target.sizes = torch.tensor([[8, 8]] * 2)
    assert_identical(target, head, inputs, into=SEEN, **GREEDY)
    assert_identical(target, head, inputs, into=SEEN, **SAMPLED)
    cpu_offload(target)
    assert_identical(target, head, inputs, into=SEEN, **GREEDY)
    target.looks = True
    for mode in (GREEDY, SAMPLED):
        refused(lambda mode=mode: target.generate(**inputs, **mode, assistant=head), ValueError, "Sees.*image_sizes")
    target.sizes = None
    assert_identical(target, head, {name: inputs[name] % 43 for name in ("input_ids", "attention_mask")}, **GREEDY)


def real_processor() -> Any:
    """A processor as published ones are, for the Llava of `MULTIMODAL`; Qwen's cannot be made without torchvision."""
    if not hasattr(transformers, "CLIPImageProcessorPil"):
        pytest.skip("this release of transformers reads images by torchvision alone")
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(44)} | {"<image>": 47}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"pad_token": "w0", "padding_side": "left", "extra_special_tokens": {"image_token": "<image>"}}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **tokens)
    reads = transformers.CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    more = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(reads, tokenizer, patch_size=4, image_token="<image>", **more)


def test_images_of_a_real_processor() -> None:
    """Two rows, three images."""
    Image = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(0)
    images = [Image.fromarray(draw.integers(256, size=(12 + 8 * index, 16, 3), dtype=np.uint8)) for index in range(3)]
    texts = ["w3 w4 <image> w5", "w5 <image> w7 <image> w9 w10"]
    inputs = dict(real_processor()(text=texts, images=images, padding=True, return_tensors="pt"))
    inputs["pixel_values"] = inputs["pixel_values"].double()
    assert (inputs["input_ids"] == 47).sum(1).tolist() == [4, 8]
    target = multimodal_target("llava")
    stock, _ = assert_identical(target, tiny_head(target), inputs, into=SEEN, **GREEDY)
    assert_identical(target, tiny_head(target), inputs, into=SEEN, **SAMPLED)
    blind = run(target, {**inputs, "pixel_values": torch.zeros_like(inputs["pixel_values"])}, 0, **GREEDY)
    assert not torch.equal(blind.sequences, stock.sequences), "images were to matter"
