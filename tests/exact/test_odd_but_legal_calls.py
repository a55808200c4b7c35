"""Odd but legal calls: extreme temperatures, lengths from elsewhere, pads that are no tokens, huge limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import replay
from support.compare import assert_identical, run
from support.letters import letters
from support.tiny import (
    VOCABULARY,
    ReplayDrafter,
    prompts,
    tiny_diffusion_drafter,
    tiny_eagle_drafter,
    tiny_head,
    tiny_target,
)
from support.trees import choose_everywhere, let_trees_grow_in_tensors
from torch import Tensor
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList, TopKLogitsWarper

from hf_dart import TreeConfig, attach
from hf_dart.decoding import feed
from hf_dart.decoding.candidate_generator import DartCandidateGenerator
from hf_dart.decoding.rank import Ranker
from hf_dart.drafters.proposal import Proposal


class SecondBest(ReplayDrafter):
    """Ranks the target's first token after a wrong one, by far."""

    def propose(self, *args: Any, **kwargs: Any) -> Proposal:
        proposal = super().propose(*args, **kwargs)
        right = proposal.logits.argmax(-1, keepdim=True)
        logits = torch.zeros_like(proposal.logits).scatter_(2, right, 6.0)
        logits[:, :1].scatter_(2, (right[:, :1] + 1) % self.vocabulary, 12.0)
        return Proposal(logits, proposal.hidden)


@pytest.mark.parametrize("temperature", [0.7, 1e-3, 1e-5])
def test_low_temperatures_on_the_tensor_path(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth and walk as on an accelerator, where sums of scores reach many thousands."""
    let_trees_grow_in_tensors(monkeypatch)
    choose_everywhere(monkeypatch)
    target = attach(tiny_target("llama"))
    options = {"do_sample": True, "top_k": 0, "temperature": temperature, "max_new_tokens": 40}
    for seed in range(4):
        stock = run(target, prompts([9]), seed, **options).sequences
        drafter = SecondBest(stock, [0], VOCABULARY, misses=[0.0], seed=seed)
        drafter.tree_config = TreeConfig(nodes=64, top_k=2, lookup=0)
        ours = run(target, prompts([9]), seed, assistant=drafter, **options)
        assert torch.equal(ours.sequences, stock)
        assert drafter.last_stats is not None
        assert drafter.last_stats.tau > 3


def test_top_k_alone_keeps_its_tokens() -> None:
    """However sure the draft is of one token, the noise may choose another of the k."""
    logits = torch.tensor([[[1000.0, 0.0, -1.0, -2.0]]])
    tokens, scores = Ranker(LogitsProcessorList([TopKLogitsWarper(3)]), 4)(logits, torch.zeros(1, 1, 4), None)
    assert tokens[0, 0, :3].tolist() == [0, 1, 2]
    assert torch.isfinite(scores[0, 0]).tolist() == [True, True, True, False]


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}], ids=["plain", "penalty"])
def test_a_pad_that_is_no_token(options: dict[str, float]) -> None:
    target = tiny_target("llama")
    given = {"max_new_tokens": 24, "pad_token_id": -1, "eos_token_id": None, "do_sample": False}
    assert_identical(target, tiny_head(target), prompts([7, 7]), **given, **options)


def test_no_room_is_taken_for_tokens_that_never_come() -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    stock = target.generate(**prompts([7]), do_sample=False, max_new_tokens=20)
    options = {"do_sample": False, "max_new_tokens": 10**12, "eos_token_id": int(stock[0, 15]), "pad_token_id": 0}
    assert_identical(target, head, prompts([7]), **options)


def test_the_length_of_a_criterion_of_ones_own_counts() -> None:
    """Refusals look at the length that the call may really reach."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target = tiny_target("llama", rope_parameters=rope, max_position_embeddings=32)
    head = tiny_head(target)
    criteria = StoppingCriteriaList([MaxLengthCriteria(60)])
    with pytest.raises(ValueError, match="rotary"):
        target.generate(**prompts([9, 4]), max_new_tokens=5, stopping_criteria=criteria, assistant=head)


def test_a_batch_up_to_where_rotary_tables_change() -> None:
    """The last token of a text is not run through the model: one more than the table was trained for fits."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target = tiny_target("llama", rope_parameters=rope, max_position_embeddings=32)
    head = tiny_head(target)
    assert_identical(target, head, prompts([9, 4]), do_sample=False, max_length=33)
    with pytest.raises(ValueError, match="set max_length to 33 or less"):
        target.generate(**prompts([9, 4]), do_sample=False, max_length=34, assistant=head)


def test_drafts_go_on_behind_a_table_that_has_no_hard_end() -> None:
    """Rotary positions run on; only no tree crosses the place where a table might end."""
    target = attach(tiny_target("llama", max_position_embeddings=24))
    options = {"do_sample": False, "max_new_tokens": 60}
    drafter = replay(target, prompts([9]), misses=[0.0], **options)
    assert_identical(target, drafter, prompts([9]), **options)
    assert drafter.last_stats is not None
    assert drafter.last_stats.tau > 5


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
    fields = {"share_embeddings": False, "hidden_size": 32, "tokenizer": tokenizer}
    diffusion = tiny_diffusion_drafter(made_for, **fields).bind(target, tokenizer)
    ends: dict[str, Any] = {"eos_token_id": [3, 11, 19], "pad_token_id": VOCABULARY - 1, "no_repeat_ngram_size": 3}
    for drafter, refine in ((head, 0), (head, 1), (diffusion, 0)):
        for options in ({"do_sample": False}, {"do_sample": True, "top_k": 0, **ends}):
            assert_identical(target, drafter, prompts([7, 4]), **options, max_new_tokens=16, refine=refine)
        for sample in (False, True):
            loop = DartCandidateGenerator.stock_loop(drafter)
            target.generate(**prompts([7]), do_sample=sample, max_new_tokens=8, custom_generate=loop)


@pytest.mark.parametrize("make", [tiny_head, tiny_diffusion_drafter])
def test_padding_in_front_of_one_row_costs_no_drafts(make: Any) -> None:
    model = tiny_target("llama")
    drafter = make(model)
    ids = prompts([9])["input_ids"]
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], dim=1)
    accepted = []
    for given in (ids, padded):
        mask = (torch.arange(given.shape[1]) >= given.shape[1] - 9).long()[None]
        model.generate(given, attention_mask=mask, assistant=drafter, do_sample=False, max_new_tokens=32)
        accepted.append(drafter.last_stats.accepted_per_depth)
    assert sum(accepted[0]) > 0
    assert accepted[1] == accepted[0]


def test_a_draft_vocabulary_is_the_targets() -> None:
    """Its LM head may have fewer rows than its embedding table."""
    target = tiny_target("llama")
    table = target.get_input_embeddings()
    target.set_input_embeddings(torch.nn.Embedding(VOCABULARY + 8, table.embedding_dim, dtype=table.weight.dtype))
    with pytest.raises(ValueError, match=f"0..{VOCABULARY - 1}"):
        tiny_head(target, draft_vocabulary=[1, VOCABULARY])


def test_inference_mode_leaves_nothing_behind() -> None:
    """Neither tensors that no gradient goes through, nor refusals of weights that were made in it."""
    fields: dict[str, Any] = {"selector_rank": 4, "draft_vocabulary": range(0, VOCABULARY, 2)}
    with torch.inference_mode():
        target = tiny_target("llama")
        assert_identical(target, tiny_head(target, **fields), prompts([7]), do_sample=False, max_new_tokens=8)
    target = tiny_target("llama")
    head = tiny_head(target, **fields)
    with torch.inference_mode():
        run(target, prompts([7]), 0, max_new_tokens=8, assistant=head)
    hidden = torch.randn(1, head.config.hidden_size, dtype=torch.float64, requires_grad=True)
    head.logits(hidden).sum().backward()
    assert hidden.grad is not None


class Later(MaxLengthCriteria):
    """Ends five tokens after its length, which is no one else's."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.max_length + 5)


def test_a_criterion_that_derives_from_the_length() -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    for later, wanted in ((8, 13), (20, 22)):
        stops = StoppingCriteriaList([Later(later)])
        stock, _ = assert_identical(target, head, prompts([7]), do_sample=False, max_length=22, stopping_criteria=stops)
        assert stock.sequences.shape[1] == wanted


@pytest.mark.parametrize("make", [tiny_head, tiny_eagle_drafter, tiny_diffusion_drafter])
@pytest.mark.parametrize("fields", [{}, {"inject_features": True, "block_attention": "bidirectional"}], ids=str)
def test_a_prompt_is_fed_in_pieces(make: Any, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that masks of a long one are not quadratic; what the drafter holds is the same."""
    if fields and make is not tiny_head:
        pytest.skip("options of DART heads")
    drafter, inputs = make(tiny_target("llama"), **fields), prompts([23, 9, 16])
    prompt, pads = inputs["input_ids"], (inputs["attention_mask"] == 0).sum(1).tolist()
    features = torch.randn(3, 23, 32 * len(drafter.feature_layers), dtype=torch.float64)
    widths: list[int] = []
    extend = type(drafter).extend
    monkeypatch.setattr(
        type(drafter), "extend", lambda self, *given: (widths.append(given[2].shape[1]), extend(self, *given))
    )
    states = [drafter.begin(3, 40) for _ in range(2)]
    for size, state in zip((2048, 5), states, strict=True):
        monkeypatch.setattr(feed, "AT_ONCE", size)
        with torch.no_grad():
            feed.PromptFeed(drafter, state, prompt, pads)(features)
    assert widths == [22, 5, 5, 5, 5, 2]
    assert torch.equal(*(state.lengths for state in states))
    for index in range(len(states[0].store.specs)):
        for row, length in enumerate(states[0].counted.tolist()):
            left, right = (state.store.buffer(index)[row, :, :length] for state in states)
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("first", [[3], [0, 3]], ids=["one row", "one of two"])
def test_positions_of_the_users_own(first: list[int]) -> None:
    """Stock counts on from where they end."""
    target = tiny_target("llama")
    inputs = prompts([7] * len(first))
    given = {**inputs, "position_ids": torch.arange(7) * 2 + torch.tensor(first)[:, None]}
    stock, _ = assert_identical(target, tiny_head(target), given, do_sample=False, max_new_tokens=12)
    assert not torch.equal(stock.sequences, run(target, inputs, 0, do_sample=False, max_new_tokens=12).sequences)
