"""DART heads: one pass of training is one pass of drafting, the output stays stock's, and files load again."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import GREEDY, MODES
from support.compare import assert_identical, run, tally
from support.heads import histories, in_one_pass
from support.sentences import refused
from support.tiny import VOCABULARY, prompts, tiny_head, tiny_target
from support.users import letters

from hf_dart import DartConfig, DartHead
from hf_dart.decoding.api import attach, detach
from hf_dart.drafters.base import Proposal
from hf_dart.drafters.draft_vocabulary import unused_token
from hf_dart.hub.loading import load_target
from hf_dart.interop.vllm import write_vllm
from hf_dart.models.trial import check_verification
from hf_dart.training.data.frequent import frequent_tokens, token_counts
from hf_dart.trees.vocabulary import spread

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SOME = [3, 4, 7, 8, 11, 15, 19, 20, 21, 22, 26, 27, 30, 31, 40, 41, 42, 46, 47]
OPTIONS: dict[str, dict[str, Any]] = {
    "one token, one feature": {"draft_length": 1, "feature_layers": [1]},
    "two tokens, one key": {"draft_length": 2, "num_attention_heads": 4, "num_key_value_heads": 1},
    "three layers": {"num_layers": 3, "num_key_value_heads": 4, "head_dim": 4, "feature_layers": [2]},
    "bidirectional": {"num_layers": 2, "block_attention": "bidirectional"},
    "bidirectional, one token": {"num_layers": 2, "block_attention": "bidirectional", "draft_length": 1},
    "three layers, bidirectional": {"num_layers": 3, "block_attention": "bidirectional"},
    "not shifted": {"num_layers": 2, "shift_logits": False},
    "not shifted, bidirectional": {"shift_logits": False, "block_attention": "bidirectional"},
    "peagle": {"num_layers": 2, "mask_mode": "peagle", "mask_token_id": 46},
    "some tokens": {"draft_vocabulary": SOME},
    "some tokens, a selector": {"draft_vocabulary": SOME, "selector_rank": 4},
}
EXACT = tally("float64, options of the head", least=1.1)


def head_with(target: Any, option: str, **config: Any) -> DartHead:
    head = tiny_head(target, **OPTIONS[option], **config)
    if head.selector is not None:
        torch.nn.init.normal_(head.selector.context.weight, generator=torch.Generator().manual_seed(4))
    return head


@torch.no_grad()
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("batch", [1, 3])
def test_drafting_is_the_training_pass(target: Any, option: str, batch: int) -> None:
    """After any history of ragged extends and proposes."""
    head = head_with(target, option)
    state = head.begin(batch, 2)  # too small: it has to grow
    for number, (seen, features, tokens) in enumerate(histories(head.config.features_width, batch, 10)):
        if number % 3 == 2:
            head.extend(state, *seen)
            continue
        depth = (None, 1, min(3, head.draft_length))[number // 3 % 3]
        proposal = head.propose(state, *seen, depth)
        assert state.lengths.tolist() == [len(row) for row in tokens]
        for row, count in enumerate(seen.counts):
            if count:  # a row without news keeps its older draft
                expected = in_one_pass(head, features[row], tokens[row])[:depth]
                torch.testing.assert_close(proposal.logits[row], expected, **CLOSE)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.matrix), 4])
def test_the_output_is_stocks(target: Any, option: str, size: int) -> None:
    head = head_with(target, option)
    inputs = prompts([9, 3, 7, 13][:size])
    for mode in ("greedy", "top-p, penalty") if size == 1 else ("T=1", "several EOS"):
        assert_identical(target, head, inputs, **MODES[mode], max_new_tokens=20, into=EXACT)


# ---- draft vocabularies -----------------------------------------------------------------------------------


def test_rows_of_the_lm_head_are_copied_once_and_anew_when_they_change() -> None:
    target = tiny_target("gptj", "eager")  # its LM head has a bias
    head = tiny_head(target, draft_vocabulary=SOME)
    hidden = torch.randn(2, 3, head.config.hidden_size, dtype=torch.float64)
    lm_head = target.get_output_embeddings()
    torch.nn.init.normal_(lm_head.bias)
    for _ in range(2):
        torch.testing.assert_close(head.logits(hidden), lm_head(hidden)[..., SOME], **CLOSE)
        with torch.no_grad():
            lm_head.weight.mul_(2)
    head.reduce_vocabulary(SOME[:4])
    torch.testing.assert_close(head.logits(hidden), lm_head(hidden)[..., SOME[:4]], **CLOSE)
    assert head.reduce_vocabulary(None).logits(hidden).shape == (2, 3, VOCABULARY)


def test_scores_are_those_of_the_whole_vocabulary_given_the_part(target: Any) -> None:
    """The same candidates, ranked with the same noise and penalties."""
    head = head_with(target, "some tokens")
    inputs, options = prompts([9]), {**MODES["top-p, penalty"], "max_new_tokens": 24}
    assert_identical(target, head, inputs, **options)
    part = head.last_stats.to_dict()
    head.reduce_vocabulary(range(VOCABULARY))
    assert_identical(target, head, inputs, **options)
    all_ids = head.last_stats.to_dict()
    head.reduce_vocabulary(None)
    assert_identical(target, head, inputs, **options)
    assert all_ids["accepted_per_depth"] == head.last_stats.to_dict()["accepted_per_depth"]
    assert part["tokens"] == all_ids["tokens"]


@torch.no_grad()
def test_a_selector_weighs_logits_of_a_draft_vocabulary(target: Any) -> None:
    """As it does those of all tokens, with noise on the scores or without."""
    head = head_with(target, "some tokens, a selector")
    generator = torch.Generator().manual_seed(5)
    head.selector.log_weight.weight.normal_(generator=generator)
    vocabulary, depth = head.draft_vocabulary, head.draft_length
    hidden = torch.randn(2, depth, head.config.hidden_size, generator=generator, dtype=torch.float64)
    logits = torch.randn(2, depth, len(vocabulary), generator=generator, dtype=torch.float64)
    columns = logits.topk(5).indices
    scores = torch.randn(columns.shape, generator=generator, dtype=torch.float64)
    some = head.transitions(Proposal(logits, hidden, vocabulary), vocabulary[:2], vocabulary[columns], scores)
    everywhere = Proposal(spread(logits, vocabulary, VOCABULARY), hidden)
    assert torch.equal(some, head.transitions(everywhere, vocabulary[:2], vocabulary[columns], scores))
    head.selector.log_weight.weight.zero_()
    assert not torch.allclose(some, head.transitions(everywhere, vocabulary[:2], vocabulary[columns], scores))


def test_frequent_tokens_are_counted() -> None:
    rows = [
        {"input_ids": torch.tensor([5, 5, 5, 2, 9, 9]), "documents": torch.tensor([0, 0, 1, 1, -1, -1])},
        {"input_ids": [7, 2, 5]},
    ]
    counts = token_counts(rows, 12)
    assert frequent_tokens(counts, 3).tolist() == [2, 5, 7]
    assert frequent_tokens(counts, 3, always=[11]).tolist() == [2, 5, 11]
    learned = [{**rows[0], "loss_mask": torch.tensor([0, 0, 1, 1, 1, 1]).bool()}]
    assert token_counts(learned, 12).nonzero().flatten().tolist() == [2, 5]
    refused(lambda: frequent_tokens(counts, 13), ValueError, "size is 13")


# ---- mask slots -------------------------------------------------------------------------------------------


def test_the_mask_token_is_one_that_no_text_contains(target: Any, tmp_path: Path) -> None:
    """A pad is none: every id of the packaged target is a token's, and P-EAGLE heads of it are made all the same."""
    tokenizer = letters("abcdefgh")
    head = tiny_head(target, mask_mode="peagle", tokenizer=tokenizer)
    assert head.config.mask_token_id == VOCABULARY - 1
    refused(lambda: unused_token(tokenizer, 8), ValueError, "give mask_token_id, the id of one that yours never do")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_special_token_0|>", "<|end|>"]})
    assert unused_token(tokenizer, 10) == 8
    tokenizer = letters("abcdefgh")
    tokenizer.pad_token = "c"
    assert (unused_token(tokenizer, 8), unused_token(tokenizer, 10)) == (2, 9)
    tokenizer.eos_token = "c"
    refused(lambda: unused_token(tokenizer, 8), ValueError, "give mask_token_id")
    model, packaged = load_target()
    head = DartHead.from_target(model, tokenizer=packaged, mask_mode="peagle")
    assert head.config.mask_token_id == packaged.pad_token_id
    write_vllm(head, tmp_path / "vllm", target=model, verifier="here")
    assert json.loads((tmp_path / "vllm" / "config.json").read_text())["mask_token_id"] == packaged.pad_token_id


# ---- what does not go together ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"draft_length": 32}, "draft_length"),
        ({"feature_layers": []}, "feature_layers"),
        ({"feature_layers": [3]}, "feature_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"block_attention": "both"}, "one of causal, bidirectional"),
        ({"num_layers": 6}, "1 to 5"),
        ({"mask_mode": "noise"}, "one of learned, peagle"),
        ({"mask_mode": "peagle"}, "mask_token_id"),
        ({"mask_mode": "peagle", "mask_token_id": 48}, "0..47"),
        ({"mask_mode": "peagle", "mask_token_id": 3, "block_attention": "bidirectional"}, "bidirectional"),
        ({"draft_vocab_size": 49}, "1 to 48"),
        ({"draft_vocabulary": []}, "at least one"),
        ({"draft_vocabulary": [3, 3]}, "different"),
        ({"draft_vocabulary": [3, 48]}, "0..47"),
    ],
    ids=str,
)
def test_bad_options_are_one_sentence(target: Any, fields: dict[str, Any], words: str) -> None:
    refused(lambda: tiny_head(target, **fields), ValueError, words)


def test_files_that_do_not_fit_are_one_sentence(target: Any, tmp_path: Path) -> None:
    """Damaged ones, and those of earlier versions that say more than their defaults."""
    head = head_with(target, "some tokens")
    head.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "inject_features": False}))
    DartHead.from_pretrained(str(tmp_path), target=target)
    (tmp_path / "config.json").write_text(json.dumps({**content, "inject_features": True}))
    refused(lambda: DartHead.from_pretrained(str(tmp_path), target=target), ValueError, "train a drafter without it")
    head.draft_vocabulary[-1] = 1000
    head.save_pretrained(tmp_path)
    refused(lambda: DartHead.from_pretrained(str(tmp_path), target=target), ValueError, "draft vocabulary")


# ---- heads as a whole -------------------------------------------------------------------------------------


def test_fields_that_differ_by_layer() -> None:
    """Gemma 4 has wider and fewer keys where it sees all."""
    target = tiny_target("gemma4")
    config = DartConfig.for_target(target)
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta) == (16, 2, 1e6)
    # As in families whose layers that see all have no positions.
    target.config.rope_parameters = {**target.config.rope_parameters, "full_attention": None}
    assert DartConfig.for_target(target).rope_theta == 1e4


def test_shares_the_targets_modules(target: Any) -> None:
    head = tiny_head(target)
    embeddings, lm_head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    lent = {embeddings.data_ptr(), lm_head.data_ptr()}
    assert not lent & {tensor.data_ptr() for tensor in head.state_dict().values()}
    assert head.state_dict().keys() == {name for name, _ in head.named_parameters()}
    assert {head.shared.embeddings.weight.data_ptr(), head.shared.lm_head.weight.data_ptr()} == lent
    assert torch.equal(head.embed(torch.tensor([3, 5])), embeddings[[3, 5]])
    # The head does not move or convert what it was lent.
    head.to(torch.float32)
    assert target.get_output_embeddings().weight.dtype == torch.float64
    assert "assistant" not in target.state_dict()


# ---- generators, devices ----------------------------------------------------------------------------------


def generators() -> tuple[bytes, Any, Any]:
    kind, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), (kind, keys.tobytes(), *rest)


def test_making_and_loading_move_no_generator(target: Any, tmp_path: Path) -> None:
    torch.manual_seed(17)
    random.seed(17)
    np.random.seed(17)
    before = generators()
    head = DartHead.from_target(target).add_selector(4)
    assert generators() == before, "from_target"
    head.save_pretrained(tmp_path)
    DartHead.from_pretrained(str(tmp_path), target=target)
    assert generators() == before, "from_pretrained"
    detach(target)
    attach(target)
    assert generators() == before, "attach"
    fresh = tiny_target("gemma3")
    check_verification(fresh)
    assert generators() == before, "check_verification"
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(lambda: DartHead.from_pretrained(str(tmp_path), target=target), ValueError, "truncated")
    assert generators() == before, "a failed load"
    refused(lambda: head.bind(tiny_target("qwen3", hidden_size=64)), ValueError, "hidden size")
    target.generate(**prompts([7]), **GREEDY, assistant=head)
    assert generators() == before, "greedy drafting"
    one = tiny_head(target)
    torch.manual_seed(1)
    assert torch.equal(one.fc.weight, tiny_head(target).fc.weight)
    assert not torch.equal(one.fc.weight, tiny_head(target, seed=1).fc.weight)


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_target_dispatched_by_accelerate(where: str, tmp_path: Path) -> None:
    """Modules split by a device map: hooks move what passes between them."""
    from accelerate import dispatch_model

    whole = tiny_target("llama", dtype=torch.float32)
    split = tiny_target("llama", dtype=torch.float32)
    kept = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
    device_map = {**dict.fromkeys(kept, "cpu"), "model.layers.1": where}
    split = dispatch_model(split, device_map=device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    head = tiny_head(split)
    inputs = prompts([7])
    for options in (GREEDY, {"do_sample": True, "top_k": 0, "max_new_tokens": 16}):
        wanted = run(whole, inputs, 0, **options)
        assert torch.equal(run(split, inputs, 0, **options).sequences, wanted.sequences)
        ours = run(split, inputs, 0, assistant=head, **options)
        assert torch.equal(ours.sequences, wanted.sequences)
        assert torch.equal(ours.state, wanted.state)
