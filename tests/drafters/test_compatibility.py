"""Does a head fit its target: what is checked at load, and how damaged files are told apart."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import GREEDY
from support.compare import assert_identical
from support.sentences import refused
from support.tiny import VOCABULARY, prompts, tiny_eagle_drafter, tiny_head, tiny_target
from support.users import letters
from transformers import AutoModelForCausalLM

from hf_dart import DartHead, load_drafter
from hf_dart.drafters import compatibility
from hf_dart.models.tokenizers import vocabulary_hash


def test_tokens_that_the_target_has_no_embeddings_of_make_no_other_vocabulary(target: Any, tmp_path: Path) -> None:
    alphabet = "".join(chr(256 + number) for number in range(VOCABULARY))
    plain, padded = letters(alphabet), letters(alphabet)
    padded.add_special_tokens({"pad_token": "<pad>"})
    for number, trained in enumerate((plain, padded)):
        folder = tmp_path / str(number)
        tiny_head(target, tokenizer=trained).save_pretrained(folder)
        for used in (plain, padded):
            DartHead.from_pretrained(str(folder), target=target, tokenizer=used)
    # As heads were saved that counted every token.
    tiny_head(target, tokenizer_hash=vocabulary_hash(padded)).save_pretrained(tmp_path / "earlier")
    load = partial(DartHead.from_pretrained, str(tmp_path / "earlier"), target=target)
    load(tokenizer=padded)
    refused(lambda: load(tokenizer=plain), ValueError, "were only added for the training, pass tokenizer=")


def test_the_tokenizer_beside_the_target_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, order in (("one", "abcdefgh"), ("two", "abcdefhg")):
        tiny_target("llama", dtype=torch.float32).save_pretrained(tmp_path / name)
        letters(order).save_pretrained(tmp_path / name)
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "two"))
    tiny_head(one, tokenizer=letters("abcdefgh")).save_pretrained(tmp_path / "head")
    refused(lambda: DartHead.from_pretrained(str(tmp_path / "head"), target=two), ValueError, "tokenizer")
    head = DartHead.from_pretrained(str(tmp_path / "head"), target=one)
    # A copy of the target is compared when it is first seen.
    twin, read = copy.deepcopy(one), []
    monkeypatch.setattr(compatibility, "tokenizer_beside", lambda target: read.append(target))
    for _ in range(3):
        twin.generate(**prompts([5]), max_new_tokens=4, assistant=head)
    assert read == [twin]
    tied = tiny_target("gemma3")  # whose modules stay, while their weights grow
    assert tied.config.tie_word_embeddings
    for target, drafter in ((twin, head), (tied, tiny_head(tied))):
        target.generate(**prompts([5]), max_new_tokens=4, assistant=drafter)
        target.resize_token_embeddings(VOCABULARY + 5)
        call = partial(target.generate, **prompts([5]), assistant=drafter)
        refused(call, ValueError, f"and .* has {VOCABULARY + 5}")


@pytest.mark.parametrize("more", [16, -4])
@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (tiny_head, {}),
        (tiny_eagle_drafter, {}),
        (tiny_eagle_drafter, {"own_lm_head": True}),
        (tiny_eagle_drafter, {"draft_vocab_size": 30}),
    ],
)
def test_padding_rows_of_the_vocabulary(target: Any, tmp_path: Path, make: Any, fields: Any, more: int) -> None:
    """Tables of different height with one tokenizer: the same vocabulary, padded differently."""
    padded = tiny_target("qwen3", vocab_size=VOCABULARY + more)
    tokenizer = letters("abcdefgh")
    make(target, tokenizer=tokenizer, **fields).save_pretrained(tmp_path)
    refused(lambda: load_drafter(str(tmp_path), target=padded), ValueError, "padding rows")
    head = load_drafter(str(tmp_path), target=padded, tokenizer=tokenizer)
    for size in ([7], [7, 3, 9]):
        for options in ({"do_sample": True, "top_k": 0}, {"do_sample": False, "repetition_penalty": 1.2}):
            inputs = prompts(size, vocabulary=VOCABULARY - 4)
            assert_identical(padded, head, inputs, **options, max_new_tokens=20)


def test_a_target_whose_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_target("qwen3").save_pretrained(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "target"), "./target"):
        target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(target.config, "name_or_path", name.replace("target", "gone"))
            assert_identical(target, tiny_head(target), prompts([7]), **GREEDY)
