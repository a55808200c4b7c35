"""A head that learns from what it drafts for, a small random target: every text stays stock's, without tolerance."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from support.compare import assert_identical, run, same
from support.sentences import refused
from support.tiny import prompts, tiny_diffusion_drafter, tiny_eagle_drafter, tiny_head, tiny_target
from support.tiny_training import changed, copies

import hf_dart
from hf_dart import Batcher, DartHead, Learner, LookupDrafter, TreeConfig, attach, detach, load_drafter
from hf_dart.learning.ring import Ring, Segment
from hf_dart.learning.student import Student

SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 32}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 32}
RAGGED = [9, 4]
FAST: dict[str, Any] = {"share": 1.0, "learning_rates": (1e-1,)}
LAYERS = {"determined": [0, 1, 2], "best": [0, 1]}  # the logits by the features, or not


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons on fewer positions: these heads gain much and soon."""
    monkeypatch.setattr("hf_dart.learning.learner._LESSON", 64)


@pytest.fixture
def target() -> Any:
    return tiny_target("qwen3")


@pytest.fixture
def head(target: Any) -> DartHead:
    return tiny_head(target, feature_layers=LAYERS["determined"])


def learning(target: Any, head: Any, **options: Any) -> Learner:
    """A learner with text at hand; calls that name no drafter stay stock's."""
    learner = Learner(**{**FAST, **options})
    learner.attach(head)
    serve(target, head, range(2))
    return learner


def serve(target: Any, head: Any, seeds: Any, **options: Any) -> None:
    for seed in seeds:
        run(target, prompts(RAGGED, seed=seed), seed, **{**SAMPLED, **options}, assistant=head)


def teach(learner: Learner, target: Any, head: Any, steps: int = 30) -> None:
    """Take steps on what was served, and let the next texts decide."""
    for _ in range(steps):
        learner.step()
    serve(target, head, range(20, 22))
    learner.step()


def does(what: Callable[[], Any], every: int = 7) -> Any:
    """A streamer that does something after so many tokens, over and over."""
    tokens = count(1)
    return SimpleNamespace(put=lambda _: next(tokens) % every or what(), end=lambda: None)


@pytest.mark.parametrize("layers", ["determined", "best", pytest.param("eagle", marks=pytest.mark.matrix)])
def test_every_text_is_stocks(target: Any, layers: str) -> None:
    """Ragged batches, with scores, between rounds and calls; and the head drafts better for it."""
    make = tiny_eagle_drafter if layers == "eagle" else tiny_head
    head = make(target, feature_layers=LAYERS.get(layers, [0, 1, 2]))
    learner = Learner(**FAST, every=3)
    learner.attach(head)
    taus, served = [], 0.0
    for seed in range(3):
        more = {"return_dict_in_generate": True, "output_scores": True} if seed == 1 else {}
        mode = GREEDY if seed == 2 else SAMPLED
        assert_identical(target, head, prompts(RAGGED, seed=seed), seed=seed, **mode, **more)
        taus.append(head.last_stats.tau)
        served += sum(head.last_stats.seconds.values())
        assert [*learner._ring.learnt, *learner._ring.fresh][-1].temperature == (seed != 2)
    assert learner.stats.serving == pytest.approx(served)
    teach(learner, target, head)
    serve(target, head, range(3), max_new_tokens=1)  # too short to learn from
    assert (learner.failure, learner.stats.learnt) == (None, True)
    assert learner.stats.steps > 20
    assert learner.stats.tau_now > learner.stats.tau_before > 1.3
    assert sum(taus) / len(taus) > 1.3
    longer, rounds = {**SAMPLED, "max_new_tokens": 96}, []
    for one in (make(target, feature_layers=head.feature_layers), head):
        run(target, prompts([8]), 9, **longer, assistant=one)
        rounds.append(one.last_stats.rounds)
    assert rounds[1] < rounds[0]


def test_requests_of_a_batcher_are_learnt_from(target: Any, head: DartHead) -> None:
    """Each text is what it is alone, while the head changes under all seats."""
    learner = Learner(**FAST, every=2)
    attach(target, head, learner=learner)
    asked = [(prompts([5 + seed % 3], seed=seed)["input_ids"], seed) for seed in range(8)]
    with Batcher(target, seats=3) as batcher:
        handles = [batcher.submit(ids, seed=seed, **SAMPLED) for ids, seed in asked]
    for handle, (ids, seed) in zip(handles, asked, strict=True):
        torch.manual_seed(seed)
        assert torch.equal(handle.result(), type(target).generate(target, ids, **SAMPLED))
    assert (learner.failure, learner.stats.tokens >= 8 * 30) == (None, True)
    assert learner.stats.steps > 5


def test_switched_in_the_middle_of_a_batch(target: Any, head: DartHead) -> None:
    learner = learning(target, head)
    for what in (learner.pause, learner.resume, learner.reset, learner.detach):
        ours = run(target, prompts([7]), 0, **SAMPLED, streamer=does(what), assistant=head)
        same(ours, run(target, prompts([7]), 0, **SAMPLED))
        assert_identical(target, head, prompts(RAGGED), **SAMPLED)


def test_errors_in_a_step(target: Any, head: DartHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """They, and a head that is compiled later, pause learning, with a warning; the call that was served goes on."""
    learner = learning(target, head, share=0)
    before = copies(head)
    step = Student.step

    def fails(self: Student, *given: Any) -> float:
        step(self, *given)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Student, "step", fails)
    learner.share = 1.0
    with pytest.warns(UserWarning, match="Learning is paused.*no memory"):
        assert_identical(target, head, prompts(RAGGED), **SAMPLED)
    assert learner.paused
    assert isinstance(learner.failure, torch.OutOfMemoryError)
    assert not changed(head, before)
    with pytest.raises(torch.OutOfMemoryError):
        learner.step()
    monkeypatch.undo()
    learner.resume()
    assert_identical(target, head, prompts(RAGGED), **SAMPLED)
    assert learner.failure is None
    hf_dart.compile(target, head, backend=None)
    with pytest.warns(UserWarning, match="Learning is paused.*compiled"):
        assert_identical(target, head, prompts([7]), **SAMPLED)
    assert learner.paused


def test_calls_in_threads_and_in_inference_mode(target: Any, head: DartHead) -> None:
    learner = learning(target, head)
    inputs = [prompts(RAGGED, seed=seed) for seed in range(4)]
    stock = [target.generate(**one, **GREEDY).tolist() for one in inputs]

    def call(number: int) -> bool:
        return target.generate(**inputs[number % 4], **GREEDY, assistant=head).tolist() == stock[number % 4]

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(call, range(4)))
    steps = learner.stats.steps
    assert steps
    with torch.inference_mode():
        serve(target, head, range(4))
    assert learner.failure is None
    assert learner.stats.steps > steps


def test_the_target_the_heads_state_and_the_generators(target: Any, head: DartHead) -> None:
    target.requires_grad_(False)
    target.get_input_embeddings().weight.requires_grad_(True)
    frozen = head.layers[0].mlp.up_proj.requires_grad_(False).weight
    as_it_was = frozen.clone()
    flags = [[weight.requires_grad for weight in module.parameters()] for module in (target, head)]
    head.train()
    before = copies(target)
    learner = learning(target, head)
    teach(learner, target, head)
    assert not changed(target, before)
    assert flags == [[weight.requires_grad for weight in module.parameters()] for module in (target, head)]
    assert all(weight.grad is None for module in (target, head) for weight in module.parameters())
    assert (learner.stats.learnt, head.training, target.training) == (True, True, False)
    assert torch.equal(frozen, as_it_was)

    def state() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    seeds = state()
    for act in (learner.step, lambda: learner.idle(0.05), learner.reset, lambda: learner.attach(head)):
        act()
        assert state() == seeds
    assert torch.is_grad_enabled()


def test_rows_of_the_lm_head_and_tables_of_a_selector_are_held_once(target: Any, head: DartHead) -> None:
    learner = learning(target, head.reduce_vocabulary(range(20)).add_selector(4))
    for one in (learner._student.frozen, learner._student.learnt):
        assert one.rows_read == head.rows_read
        assert one.selector is head.selector


def test_copies_go_on_by_themselves(target: Any, head: DartHead) -> None:
    learner = learning(target, head)
    attach(target, head)
    other = copy.deepcopy(target)
    copied = other.generate.default
    other.generate.default = None
    (second,) = copied.observers
    assert second is not learner
    assert second._student.head is copied
    before = copies(head)
    for _ in range(3):
        assert_identical(other, copied, prompts(RAGGED), **SAMPLED)
    second.step()
    assert second.stats.steps > learner.stats.steps
    assert not changed(head, before)
    pickled = pickle.loads(pickle.dumps(head))
    assert not changed(pickled, before)
    assert len(pickled.observers[0]._ring.fresh) + len(pickled.observers[0]._ring.learnt) == 0  # no text


@pytest.mark.parametrize("layers", ["determined", "best"])
@pytest.mark.parametrize("long", [False, True])
def test_what_is_kept_is_what_the_target_says_of_the_text(target: Any, layers: str, long: bool) -> None:
    """Features, tokens and logits of each position, prompts of several rows included."""
    head, learner = tiny_head(target, feature_layers=LAYERS[layers]), Learner(share=0)
    learner.attach(head)
    lengths = [150, 140] if long else RAGGED
    options = {**SAMPLED, "max_new_tokens": 140, "tree_config": TreeConfig(nodes=8)}  # all rounds are drafted
    text = run(target, prompts(lengths), 0, **options, assistant=head).sequences
    assert head.last_stats.tau > 1.3
    student, segments = learner._student, [*learner._ring.fresh]
    assert len(segments) == 2 * len(lengths) if long else len(lengths)
    assert learner.stats.tokens > 130 * len(lengths)
    for number, segment in enumerate(segments):
        row = number % len(lengths)
        ids = text[row : row + 1, max(lengths) - lengths[row] :]
        parts = [ids[0, start : start + len(segment)].tolist() for start in range(ids.shape[1])]
        at = parts.index(segment.next_tokens.tolist())
        plain = target(ids, output_hidden_states=True)
        wanted = torch.cat([plain.hidden_states[layer] for layer in head.feature_layers], dim=-1)[0]
        there = slice(at - 1, at - 1 + len(segment))
        torch.testing.assert_close(segment.features, wanted[there])
        assert (segment.prompt, segment.temperature) == (max(lengths[row] - at, 0), 1.0)
        # Rounds began after the prompt, and after what each one before had committed.
        starts = {*accumulate((tokens[row] for tokens in head.last_stats.committed), initial=lengths[row] - 1)}
        begun = sorted(start for start in starts if at <= start + 1 < at + len(segment))
        assert (segment.begun.nonzero()[:, 0] + at - 1).tolist() == begun
        logits = plain.logits[0, there]
        if layers == "determined":
            assert not segment.best
            found = student._target_logits(segment.features[:, -target.config.hidden_size :])
            torch.testing.assert_close(found, logits)
        else:
            found = student._target_logits(*(part[None] for part in segment.best))[0]
            torch.testing.assert_close(found[segment.prompt :], logits[segment.prompt :])


def test_what_fills_up_a_row_is_no_text(target: Any, head: DartHead) -> None:
    """Rows go in step, as stock's scores are asked for, and one ends before the other."""
    learner = Learner(share=0)
    learner.attach(head)
    text = run(target, prompts(RAGGED), 0, **SAMPLED).sequences[:, max(RAGGED) :].tolist()
    length = next(n for n in range(9, 32) if text[1][n - 1] not in (*text[0], *text[1][: n - 1]))
    ends = {
        "eos_token_id": text[1][length - 1],
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    serve(target, head, [0], **ends)
    assert [one.next_tokens[one.prompt :].tolist() for one in learner._ring.fresh] == [text[0], text[1][:length]]


@pytest.mark.parametrize("deepest", [None, 2])
def test_comparisons_are_of_what_the_head_would_have_drafted(deepest: int | None, target: Any, head: DartHead) -> None:
    """Compared at each position, with the cache that decoding would have there, as deep as trees go."""
    head.tree_config = replace(head.tree_config, depth=deepest)
    learner = Learner(share=0)
    learner.attach(head)
    serve(target, head, [0], max_new_tokens=20, temperature=0.8)
    segment, student, depth = learner._ring.fresh[1], learner._student, deepest or head.draft_length
    assert (student.learnt.draft_length, head.draft_length) == (depth, head.config.draft_length)
    found = student.expected([segment], 3, [student.frozen])[0]
    logits = target.lm_head(segment.features[:, -target.config.hidden_size :]).detach()
    wanted = []
    for start in range(segment.prompt - 1, len(segment) - head.draft_length - 1, 3):
        state = head.begin(1, len(segment))
        read = segment.features[None, : start + 1], segment.next_tokens[None, : start + 1], torch.tensor([start + 1])
        with torch.no_grad():
            drafts = head.propose(state, *read).logits[0]
        chance, total = 1.0, 0.0
        for place in range(depth):
            token = int(segment.next_tokens[start + place + 1])
            p, q = (scores.div(0.8).softmax(-1) for scores in (logits[start + place + 1], drafts[place]))
            chance *= float(1 / torch.maximum(p, q * p[token] / q[token]).sum())
            total += chance
        wanted.append(total)
    torch.testing.assert_close(found.tolist(), wanted, rtol=1e-5, atol=1e-5)


def test_drafts_are_learnt_where_rounds_began(
    target: Any, head: DartHead, monkeypatch: pytest.MonkeyPatch, noted: Any
) -> None:
    learner = learning(target, head, share=0)
    segments = [*learner._ring.fresh]
    drawn = noted(Student, "_drafts", lambda student, model, batch: batch["anchors"])
    monkeypatch.setattr("hf_dart.learning.student._ANYWHERE", 0.0)
    learner._student.step(segments, 1e-3)
    for row, segment in zip(drawn[-1].tolist(), segments, strict=True):
        anchors = {anchor for anchor in row if anchor >= 0}
        assert anchors <= {*segment.begun.nonzero()[:, 0].tolist()}
        assert len(anchors) > 2
    paused = [replace(one, begun=torch.zeros_like(one.begun)) for one in segments]
    learner._student.step(paused, 1e-3)
    assert (drawn[-1] >= 0).any(1).all()


def test_a_running_mean_of_the_weights_drafts(target: Any, head: DartHead) -> None:
    learner = learning(target, head, share=0)
    student, means = learner._student, list[torch.Tensor]()
    for number in range(1, 41):
        learner.step()
        weights = [one.clone() for one in student._masters]
        reach = min((number + 7) / 8, 16)
        means = [old.lerp(new, 1 / reach) for old, new in zip(means or weights, weights, strict=True)]
    student.use(True)
    for name, weight, mean in zip(student.names, weights, means, strict=True):
        assert not torch.equal(weight, mean)
        assert torch.equal(head.get_parameter(name), mean)


def test_memory_is_bounded_and_text_is_learnt_from_only_after_the_comparison(target: Any, head: DartHead) -> None:
    limit = 1024 * (3 * target.config.hidden_size + 1) * 8
    learner = learning(target, head, memory=limit, share=0)
    ring = learner._ring
    assert not ring.learnt
    assert learner.stats.steps == 0
    learner.step()
    assert not ring.fresh
    served = len(ring.learnt)
    serve(target, head, [5])
    assert len(ring.learnt) == served
    assert any(one is ring.learnt[-1] for one in ring.draw(4, torch.Generator()))
    serve(target, head, range(20))
    kept = [*ring.learnt, *ring.fresh]
    assert len(kept) < 22  # one row of each call, as there is room for; the first ones have gone
    assert limit / 2 < ring.bytes == sum(one.bytes for one in kept) <= 3 * limit / 4


def test_the_oldest_text_makes_room() -> None:
    """What was learnt from goes first."""
    ring, held = Ring(3 * 68), []
    for number in range(7):
        ring.add(Segment(torch.zeros(4, 2), torch.full((4,), number), torch.ones(4).bool(), 0.0))
        held.append([[int(one.next_tokens[0]) for one in part] for part in (ring.learnt, ring.fresh)])
        if number == 1:
            ring.take_fresh()
    assert held[2:] == [[[0, 1], [2]], [[1], [2, 3]], [[], [2, 3, 4]], [[], [3, 4, 5]], [[], [4, 5, 6]]]


def test_a_pause_within_a_call_leaves_no_gap_in_a_text(target: Any, head: DartHead) -> None:
    learner = Learner(share=0)
    learner.attach(head)
    pausing = does(lambda: setattr(learner, "paused", not learner.paused), every=12)
    text = run(target, prompts([9]), 0, do_sample=False, max_new_tokens=34, assistant=head, streamer=pausing).sequences
    (kept,) = (one.next_tokens.tolist() for one in learner._ring.fresh)
    assert kept == text[0, -len(kept) :].tolist()


def test_it_goes_back_where_learning_does_not_win(target: Any, head: DartHead) -> None:
    """Steps that change nothing: no draft is made with them, and it waits for other text."""
    learner = learning(target, head, learning_rates=(1e-30,))
    before = copies(head)
    for seed in range(60):  # how many it takes depends on the time that steps take
        assert_identical(target, head, prompts(RAGGED, seed=seed), seed=seed, **SAMPLED)
        assert not learner.stats.learnt
        if learner.stats.learning_rate is None:
            break
    assert learner.stats.learning_rate is None
    assert not changed(head, before)
    steps = learner.stats.steps
    serve(target, head, range(3))
    assert learner.stats.steps == steps
    assert learner.stats.tau_now == learner.stats.tau_before


def test_the_share_is_kept(target: Any, head: DartHead) -> None:
    learner = learning(target, head, share=0.25)
    serve(target, head, range(2, 6))
    stats = learner.stats
    longest = stats.seconds / max(stats.steps, 1) + 1.0  # one step or comparison may end later
    assert 0 < stats.seconds < 0.25 * stats.serving + longest
    assert stats.share == stats.seconds / stats.serving
    assert f"{stats.steps} steps" in str(stats)


def test_reset_pause_and_a_loss_of_no_number(target: Any, head: DartHead, monkeypatch: pytest.MonkeyPatch) -> None:
    before = copies(head)
    learner = learning(target, head)
    teach(learner, target, head)
    assert learner.stats.learnt
    learner.pause()
    tokens, steps = learner.stats.tokens, learner.stats.steps
    serve(target, head, [5])
    assert (learner.stats.tokens, learner.stats.steps) == (tokens, steps)
    learner.reset()
    assert not changed(head, before)
    assert learner.stats.steps == learner.stats.tokens == 0
    assert learner.step() is None
    learner.resume()
    serve(target, head, range(3))
    teach(learner, target, head)
    assert learner.stats.learnt
    monkeypatch.setattr(Student, "step", lambda *_: math.nan)
    learner.step()
    assert not changed(head, before)
    assert (learner.stats.learnt, learner.stats.tau_now) == (False, learner.stats.tau_before)


def test_rates_that_do_not_learn(target: Any, head: DartHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is tried; after the last, learning pauses, and begins again with the first."""
    rates: list[float] = []
    monkeypatch.setattr(Student, "step", lambda student, segments, rate: rates.append(rate) or math.nan)
    monkeypatch.setattr("hf_dart.learning.learner._CHANGE", math.inf)
    learner = Learner(share=0.0, learning_rates=(1e-1, 1e-2))
    learner.attach(head)
    serve(target, head, range(3))
    learner.step()
    learner.step()
    assert learner.stats.learning_rate is None
    learner._wake = learner.stats.tokens
    serve(target, head, range(5))
    learner.idle(60)
    assert rates == [1e-1, 1e-2] * 2


def test_attached_and_detached(target: Any, head: DartHead) -> None:
    """Calls that name no drafter draft, and are learnt from; the last learner that was given learns."""
    stock = [run(target, prompts(RAGGED, seed=seed), seed, **SAMPLED) for seed in range(3)]
    first, learner = Learner(**FAST), Learner(**FAST)
    attach(target, head, learner=first)
    attach(target, head, learner=learner)
    for seed, wanted in enumerate(stock):
        same(run(target, prompts(RAGGED, seed=seed), seed, **SAMPLED), wanted)
    assert learner.stats.tokens == 3 * 2 * 32
    assert first.stats.tokens == 0
    other = attach(tiny_target("qwen3"), head)
    attach(target, tiny_head(target))
    detach(other)  # which has no learner
    assert head.observers == (learner,)
    detach(target)
    assert head.observers == ()
    same(run(target, prompts(RAGGED), 0, **SAMPLED), stock[0])
    attach(target, head, learner=first)
    attach(target, tiny_head(target), learner=Learner())
    assert head.observers == (), "each model has one learner"


def test_weights_that_others_write_stay(target: Any, head: DartHead) -> None:
    """The learner begins anew with them."""
    learner = learning(target, head)
    teach(learner, target, head)
    assert learner.stats.learnt
    head.fc.weight.data.neg_()
    before = copies(head)
    for act in (learner.reset, lambda: serve(target, head, range(2)), learner.step, learner.step, learner.reset):
        act()
        assert not changed(head, before)
    serve(target, head, range(2))
    teach(learner, target, head)
    assert learner.stats.learnt
    learner.reset()
    assert not changed(head, before)


def test_sixteen_bits(target: Any) -> None:
    """Small steps add up."""
    head = tiny_head(target, feature_layers=LAYERS["determined"]).to(torch.bfloat16)
    learner = learning(target, head, learning_rates=(1e-4,), share=0)
    for _ in range(61):
        assert learner.step() is not None
    weights = copies(learner._student.frozen)
    assert len(changed(learner._student.learnt, weights)) > len(weights) / 2
    assert_identical(target, head, prompts(RAGGED), **SAMPLED)


def test_what_is_learnt_drafts_within_a_region_of_autocast(target: Any, head: DartHead) -> None:
    """Which keeps weights as it has cast them once."""
    head = head.float()
    learner, seen = learning(target, head, share=0), torch.ones(1, head.fc.in_features)
    with torch.autocast("cpu", torch.bfloat16):
        first = head.fc(seen)
        learner.step()
        learner._student.use(True)
        assert not torch.equal(head.fc(seen), first)


@pytest.mark.gpu
def test_prompts_on_the_host_of_a_target_on_a_gpu() -> None:
    target: Any = tiny_target("qwen3", dtype=torch.float32).to("cuda")
    assert learning(target, tiny_head(target, feature_layers=LAYERS["best"]), share=0).step() is not None


@pytest.mark.parametrize("rank", [None, 4])
def test_saved_heads_load(target: Any, head: DartHead, rank: int | None, tmp_path: Path) -> None:
    """Saved as a head, or as an adapter of the one that it came from."""
    head.save_pretrained(tmp_path / "base")
    head = DartHead.from_pretrained(str(tmp_path / "base"), target=target)
    learner = learning(target, head, lora_rank=rank, learning_rates=(1e-1,))
    teach(learner, target, head)
    assert learner.stats.learnt
    learner.save(str(tmp_path / "learnt"))
    assert (tmp_path / "learnt" / "adapter_config.json").exists() == (rank is not None)
    loaded = load_drafter(str(tmp_path / "learnt"), target=target)
    inputs = prompts(RAGGED, seed=20)
    drafts = []
    for one in (head, loaded):
        assert_identical(target, one, inputs, **SAMPLED, tree_config=TreeConfig(nodes=12))
        drafts.append(one.last_stats.committed)
    assert drafts[0] == drafts[1]
    learner.reset()
    first = DartHead.from_pretrained(str(tmp_path / "base"), target=target)
    for one in (head, first):
        run(target, inputs, 0, **SAMPLED, tree_config=TreeConfig(nodes=12), assistant=one)
    assert head.last_stats.committed == first.last_stats.committed != drafts[0]


def test_heads_and_options_that_are_refused(target: Any, head: DartHead, tmp_path: Path) -> None:
    attach(target)
    compiled = tiny_head(target)
    hf_dart.compile(target, compiled, backend=None)
    quantised = tiny_head(target)
    quantised.fc.weight = torch.nn.Parameter(quantised.fc.weight.detach().to(torch.int8), requires_grad=False)
    head.save_pretrained(tmp_path)
    adapted = DartHead.from_pretrained(str(tmp_path), target=target)
    adapted.add_adapter(LoraConfig(r=2))
    other = tiny_head(target)
    learner = learning(target, other)
    cases: list[tuple[Any, Callable[[], Any], str]] = [
        (LookupDrafter(), Learner, "not a LookupDrafter"),
        (tiny_diffusion_drafter(target), Learner, "not a DiffusionDrafter"),
        (tiny_head(target).requires_grad_(False), Learner, "frozen"),
        (compiled, Learner, "compiled"),
        (quantised, Learner, "quantised"),
        (None, Learner, "learner= trains the drafter"),
        (head, lambda: torch.optim.Adam(head.parameters()), "takes a hf_dart.Learner, not Adam"),
        (head, lambda: learner, "has a head already"),
        (tiny_head(target), lambda: Learner(lora_rank=4), "in no folder"),
        (adapted, lambda: Learner(lora_rank=4), "has an adapter; leave lora_rank out"),
        (head, lambda: Learner(share=1.5), "share is 1.5"),
        (head, lambda: Learner(share=-0.1), "share is -0.1"),
        (head, lambda: Learner(every=0), "every is 0"),
        (head, lambda: Learner(lora_rank=0), "lora_rank is 0"),
        (head, lambda: Learner(learning_rates=()), "learning_rates is"),
        (head, lambda: Learner(memory=100), "memory"),
    ]
    for drafter, make, about in cases:
        refused(lambda one=drafter, make=make: attach(target, one, learner=make()), (ValueError, TypeError), about)
        assert drafter is None or drafter.observers == ()
    for drafter, given, before in ((head, Learner(), ()), (other, learner, (learner,)), (other, Learner(), (learner,))):
        with pytest.raises(TypeError, match="memory"):
            attach(target, drafter, learner=given, memory=3)
        assert drafter.observers == before, "a learner that was there goes on"
    for act in (Learner().step, lambda: Learner().save("x"), lambda: Learner().idle(1)):
        with pytest.raises(ValueError, match="has no head"):
            act()
