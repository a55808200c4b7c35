"""Vocabularies of drafters and targets: tables of different sizes, drafts of some tokens, copied weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import assert_identical, run
from support.tiny import VOCABULARY, prompts, tiny_head, tiny_target
from support.users import letters

from hf_dart import attach
from hf_dart.decoding.candidate_generator import DartCandidateGenerator


def test_copied_weights_follow_the_targets_dtype() -> None:
    target = tiny_target("llama", dtype=torch.float32)
    head = tiny_head(target, selector_rank=4, draft_vocabulary=range(0, VOCABULARY, 2))
    run(target, prompts([7]), 0, max_new_tokens=8, assistant=head)
    target.double()
    assert_identical(target, head.double(), prompts([7]), do_sample=False, max_new_tokens=8)


@pytest.mark.parametrize("rows", [VOCABULARY - 8, VOCABULARY + 8])
def test_tables_that_differ_in_padding_rows(rows: int) -> None:
    """One tokenizer, tables of different size: the drafter scores fewer or more ids than the target has."""
    made_for, target, tokenizer = tiny_target("llama", vocab_size=rows), attach(tiny_target("llama")), letters("abcdef")
    head = tiny_head(made_for, own_lm_head=True, editor=True, tokenizer=tokenizer).bind(target, tokenizer)
    ends: dict[str, Any] = {"eos_token_id": [3, 11, 19], "pad_token_id": VOCABULARY - 1, "no_repeat_ngram_size": 3}
    for refine in (0, 1):
        for options in ({"do_sample": False}, {"do_sample": True, "top_k": 0, **ends}):
            assert_identical(target, head, prompts([7, 4]), **options, max_new_tokens=16, refine=refine)
    for sample in (False, True):
        loop = DartCandidateGenerator.stock_loop(head)
        target.generate(**prompts([7]), do_sample=sample, max_new_tokens=8, custom_generate=loop)


def test_a_draft_vocabulary_is_the_targets() -> None:
    """Its LM head may have fewer rows than its embedding table."""
    target = tiny_target("llama")
    table = target.get_input_embeddings()
    target.set_input_embeddings(torch.nn.Embedding(VOCABULARY + 8, table.embedding_dim, dtype=table.weight.dtype))
    with pytest.raises(ValueError, match=f"0..{VOCABULARY - 1}"):
        tiny_head(target, draft_vocabulary=[1, VOCABULARY])
