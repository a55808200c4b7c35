"""Drafts inside transformers' own assisted loop: greedy text is stock's, sampled text follows stock's law."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from support.cases import FAMILIES
from support.families import needs_running_states
from support.tiny import PAD, VOCABULARY, WINDOW, ReplayDrafter, prompts, tiny_diffusion_drafter, tiny_head, tiny_target
from support.users import Listener, OwnError, Processor
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from hf_dart import DartCandidateGenerator, DartHead, TreeConfig
from hf_dart.drafters.base import Proposal
from hf_dart.models.stock_steps import CACHE

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 15, "eos_token_id": [3, 11]},
    "EOS": {"eos_token_id": list(range(3, VOCABULARY, 6)), "pad_token_id": PAD},
}
stock_loop: Any = DartCandidateGenerator.stock_loop


@pytest.mark.parametrize(
    ("family", "attention", "pads"),
    [*((family, "sdpa", 3 * (index % 2)) for index, family in enumerate(FAMILIES)), ("bloom", "eager", 0)],
)
def test_greedy_is_stocks(family: str, attention: str, pads: int) -> None:
    model = tiny_target(family, attention)
    # One row after padding; it begins inside the sliding window.
    inputs = {name: torch.nn.functional.pad(value, (pads, 0)) for name, value in prompts([WINDOW - 2]).items()}
    for mode in MODES.values():
        told = {"return_dict_in_generate": True, "output_scores": True}
        options = {**mode, "do_sample": False, "max_new_tokens": 24, **told}
        stock = model.generate(**inputs, **options)
        drafters: list[Any] = [ReplayDrafter(stock.sequences, [pads], VOCABULARY, misses=[few]) for few in (0.0, 0.3)]
        # Bloom takes no tree mask, so no head can be attached; chains run all the same.
        drafters += [tiny_head(model)] if family != "bloom" else []
        for drafter in drafters:
            ours = model.generate(**inputs, **options, custom_generate=stock_loop(drafter))
            assert torch.equal(ours.sequences, stock.sequences)
            torch.testing.assert_close(torch.stack(ours.scores), torch.stack(stock.scores))
            assert ours[CACHE].get_seq_length() == stock[CACHE].get_seq_length()
            # The first token is the prefill's.
            stats = drafter.last_stats
            assert stats.tokens == stock.sequences.shape[1] - inputs["input_ids"].shape[1] - 1
            if drafter is drafters[0] and stats.tokens > 7:
                assert stats.tau > 4


def test_head_drafts_as_in_its_own_loop(target: Any, head: DartHead) -> None:
    # What the head reads is right: its chain of one wins as many rounds as the same chain in hf_dart's own loop.
    own, stocks = [], []
    for seed in range(6):
        inputs = prompts([9], seed)
        head.tree_config = TreeConfig(nodes=6, depth=5, beam=1, top_k=1, lookup=0)
        first = target.generate(**inputs, do_sample=False, max_new_tokens=40, assistant=head)
        own.append(head.last_stats.committed)
        second = target.generate(**inputs, do_sample=False, max_new_tokens=40, custom_generate=stock_loop(head))
        stocks.append(head.last_stats.committed)
        assert torch.equal(first, second)
    assert own == stocks
    assert sum(map(len, own)) < 6 * 39


class Edited(ReplayDrafter):
    """Alone its distributions prefer a wrong token; seen after the right predecessor, the right one wins."""

    def propose(self, *args: Any, **kwargs: Any) -> Proposal:
        known = super().propose(*args, **kwargs)
        self.right = known.logits.argmax(-1)
        known.logits.scatter_(2, (self.right[..., None] + 1) % VOCABULARY, 12.5)
        return known

    def transitions(self, proposal: Proposal, roots: Tensor, candidates: Tensor, scores: Tensor) -> Tensor:
        right = candidates == self.right[..., None]
        in_front = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], dim=1)
        return torch.where(in_front[..., None] & right[:, :, None], 0.0, -9.0)


def test_drafts_look_at_the_token_in_front(target: Any) -> None:
    inputs = prompts([7])
    options: dict[str, Any] = {**inputs, "do_sample": False, "max_new_tokens": 24}
    stock = target.generate(**options)
    drafter = Edited(stock, [0], VOCABULARY, misses=[0.0])
    assert torch.equal(target.generate(**options, custom_generate=stock_loop(drafter)), stock)
    assert drafter.last_stats.tau > 4


class Outcomes:
    """Runs a function once for every outcome of its random draws, and sums up their probabilities."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "multinomial", self._multinomial)
        monkeypatch.setattr(torch, "rand_like", self._rand_like)

    def law(self, function: Callable[[], Tensor]) -> dict[tuple[int, ...], float]:
        law: dict[tuple[int, ...], float] = defaultdict(float)
        self._todo: list[list[int]] = [[]]
        while self._todo:
            self._planned, self._taken, self._weight = self._todo.pop(), [], 1.0
            law[tuple(function()[0].tolist())] += self._weight
        assert sum(law.values()) == pytest.approx(1, abs=1e-6)
        return law

    def _choose(self, weights: list[float]) -> int:
        possible = [index for index, weight in enumerate(weights) if weight > 0]
        if len(self._taken) == len(self._planned):
            self._todo += [[*self._taken, other] for other in possible[1:]]
            self._planned = [*self._taken, possible[0]]
        choice = self._planned[len(self._taken)]
        self._taken.append(choice)
        self._weight *= weights[choice] / sum(weights)
        return choice

    def _multinomial(self, weights: Tensor, num_samples: int) -> Tensor:
        assert weights.shape[0] == num_samples == 1
        return torch.tensor([[self._choose(weights[0].tolist())]])

    def _rand_like(self, ratios: Tensor) -> Tensor:
        """Stock compares these numbers with `ratios`: a draft is kept with probability min(1, ratio)."""
        kept = ratios.double().clamp(max=1)
        before = torch.cat([torch.ones(1), kept.flatten().cumprod(0)])
        rejected = torch.cat([1 - kept.flatten(), torch.ones(1)])
        first_rejected = self._choose((before * rejected).tolist())
        return torch.where(torch.arange(len(kept)) < first_rejected, 0.0, 2.0)


LAWS: dict[str, dict[str, Any]] = {
    "T=1, EOS": {"top_k": 0, "eos_token_id": 1, "pad_token_id": 0},
    "warpers and penalty": {"temperature": 1.5, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.3},
}


@pytest.fixture(scope="module", params=["independent drafts", "selector", "unmasked out of order"])
def three_words(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A target of three tokens, none of which is sure, and a drafter that disagrees with it."""
    model = tiny_target("llama", vocab_size=3)
    with torch.no_grad():
        if request.param == "unmasked out of order":
            # Chances recorded while tokens are revealed would be wrong; tokens drawn from the last step's are right.
            drafter: Any = tiny_diffusion_drafter(model, draft_length=2, denoise_steps=2)
        else:
            drafter = tiny_head(model, draft_length=2)
        if request.param == "selector":
            drafter.add_selector(4)
            drafter.selector.context.weight.normal_(std=4.0)
            drafter.selector.log_scale.weight.normal_()
            # One token of three is no candidate; what follows it is drafted without regard to it.
            drafter.tree_config = TreeConfig(top_k=2)
        model.lm_head.weight.mul_(0.05)
    return model, drafter


STOCKS: dict[str, dict[tuple[int, ...], float]] = {}
"""Stock's law by mode, whoever drafts."""


@pytest.mark.parametrize("mode", LAWS)
def test_sampling_follows_stocks_law(mode: str, three_words: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (model, drafter), outcomes, ids = three_words, Outcomes(monkeypatch), torch.tensor([[2, 0, 1, 2]])
    # The first token is the prefill's and needs no branches.
    options = {"do_sample": True, "max_new_tokens": 4, "begin_suppress_tokens": [0, 1], **LAWS[mode]}
    options |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if mode not in STOCKS:
        STOCKS[mode] = outcomes.law(lambda: model.generate(**options))
    stock = STOCKS[mode]
    ours = outcomes.law(lambda: model.generate(**options, custom_generate=stock_loop(drafter)))
    assert sum(weight > 0.01 for weight in stock.values()) >= 10
    assert max(abs(stock.get(text, 0.0) - ours.get(text, 0.0)) for text in {*stock, *ours}) < 1e-6
    if mode == "T=1, EOS":
        for text, weight in stock.items():
            logits = model(torch.tensor([text])).logits[0].detach()
            wanted = 1.0
            for place in range(5, len(text)):
                wanted *= float(logits[place - 1].softmax(-1)[text[place]])
                if text[place] == 1:
                    break
            assert weight == pytest.approx(wanted, abs=1e-6)


def test_nothing_is_left_on_the_model_and_threads_do_not_meet() -> None:
    model = tiny_target("qwen3")
    heads = [tiny_head(model, seed=seed) for seed in range(3)]
    before = dict(vars(model))
    for streamer in (Listener(), Listener(1)):
        loop = stock_loop(heads[0], streamer=streamer)
        with pytest.raises(OwnError) if streamer.last else nullcontext():
            output = model.generate(**prompts([7]), max_new_tokens=20, streamer=streamer, custom_generate=loop)
            *shown, end = streamer.calls
            assert torch.cat([torch.tensor(value).flatten() for value, _ in shown]).equal(output[0])
            assert end == "end"
        assert vars(model) == before

    def written(number: int, **drafting: Any) -> list[int]:
        return model.generate(**prompts([6], number), max_new_tokens=30, do_sample=False, **drafting)[0].tolist()

    wanted = [written(number) for number in range(3)] * 3
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda number: written(number, custom_generate=stock_loop(heads[number])), [0, 1, 2] * 3)
        assert written(0, prompt_lookup_num_tokens=3) == wanted[0]
        assert list(found) == wanted
    assert vars(model) == before


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "batch": (prompts([7, 5]), "one row at a time"),
    "return sequences": ({"num_return_sequences": 2, "do_sample": True}, "one row at a time"),
    "beams": ({"num_beams": 2}, "num_beams"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
    "ensemble": ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
    "time": ({"max_time": 60.0}, "asks MaxTimeCriteria once a round"),
    "criterion": ({"stopping_criteria": [MaxTimeCriteria(60.0)]}, "asks MaxTimeCriteria"),
    "length": ({"stopping_criteria": [MaxLengthCriteria(10)]}, "give max_length="),
    "end token": ({"stopping_criteria": [EosTokenCriteria([5])], "pad_token_id": PAD}, "give .* eos_token_id="),
    "guidance": ({"guidance_scale": 1.5}, "calls UnbatchedClassifierFreeGuidanceLogitsProcessor on rejected"),
    "processor": ({"logits_processor": [Processor("keeps count")]}, "calls Processor on rejected drafts"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "hidden states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "gives hidden states to"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "static cache": ({"cache_implementation": "static"}, "a static cache"),
    "embeddings": ({"input_ids": None, "inputs_embeds": torch.ones(1, 4, 32, dtype=torch.float64)}, "token ids"),
    "right padding": ({"attention_mask": torch.tensor([[1] * 5 + [0] * 2])}, "pad on the left"),
    # transformers 5.17 takes it for a finished candidate.
    "a prompt that ends": ({"eos_token_id": int(prompts([7])["input_ids"][0, -1])}, "ends in an end token"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_loop_gets_wrong_is_refused(target: Any, head: DartHead, case: str) -> None:
    options, says = REFUSED[case]
    usual = {**prompts([7]), "max_new_tokens": 12, "custom_generate": stock_loop(head)}
    given = {name: value for name, value in {**usual, **options}.items() if value is not None}
    with pytest.raises(ValueError, match=says) as refusal:
        target.generate(**given)
    assert str(refusal.value).count(". ") == 0
    torch.testing.assert_close(target.generate(**usual), target.generate(**prompts([7]), max_new_tokens=12))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_targets_and_caches_that_do_not_fit_are_refused(target: Any, head: DartHead) -> None:
    def refused(model: Any, drafter: Any, says: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=says):
            model.generate(**{**prompts([7]), "max_new_tokens": 40, **options}, custom_generate=stock_loop(drafter))

    first = target.generate(**prompts([7]), max_new_tokens=4, return_dict_in_generate=True)
    cached = {"input_ids": first.sequences, "attention_mask": None, CACHE: first[CACHE]}
    refused(target, head, "after a cached prefix", **cached)
    refused(tiny_target("llama", hidden_size=40, head_dim=10), head, "hidden")
    refused(target.train(), head, "train mode")
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    ends = tiny_target("llama", max_position_embeddings=32, rope_parameters=rope)
    refused(ends, tiny_head(ends), r"fewer tokens \(by 14\)")
    options = {**prompts([7]), "do_sample": False, "max_length": 33}
    assert torch.equal(ends.generate(**options, custom_generate=stock_loop(tiny_head(ends))), ends.generate(**options))
    soft = get_peft_model(target.eval(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    refused(soft.double().eval(), head, "soft prompts")


@needs_running_states
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_running_states_are_refused(family: str) -> None:
    drafter = ReplayDrafter(torch.zeros(1, 40, dtype=torch.long), [0], VOCABULARY, misses=[0.0])
    loop = stock_loop(drafter)
    with pytest.raises(ValueError, match="cannot take back drafts from a running state"):
        tiny_target(family, dtype=torch.float32).generate(**prompts([7]), max_new_tokens=12, custom_generate=loop)
