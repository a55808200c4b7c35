"""Requests of a batcher: each writes what `generate` writes for it alone, whatever comes, goes or fails beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby, product
from random import Random
from threading import Event, Thread, current_thread, main_thread
from typing import Any

import pytest
import torch
from support import compare
from support.cases import GREEDY, SAMPLED
from support.families import needs_running_states
from support.makers import MAKERS, PARTS, pair
from support.tiny import prompts, tiny_head, tiny_target
from support.users import TOKENIZER, Criterion, FormProcessor, Listener, OwnError, Processor, Stopped, fail
from torch import Tensor
from transformers import LogitsProcessor

from hf_dart import Batcher, Learner, LookupDrafter, SuffixStore, TreeConfig, attach
from hf_dart.learning import learner as learning
from hf_dart.models import devices, packed_weights
from hf_dart.models.verify import Verifier
from hf_dart.serve import batcher as batcher_module
from hf_dart.serve import prefixes as prefixes_module
from hf_dart.serve.handle import Handle

try:
    import xgrammar
    import xgrammar.contrib.hf
except ImportError:
    xgrammar = None

DRAFTERS = [*MAKERS, *PARTS, "lookup", "none"]


class Fails(LogitsProcessor):
    """Raises at a length."""

    def __init__(self, length: int, error: type[BaseException] = OwnError) -> None:
        self.length, self.error = length, error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            raise self.error
        return scores


@cache
def pattern() -> Any:
    """A compiled grammar of xgrammar."""
    info = xgrammar.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=48, stop_token_ids=[0])
    return xgrammar.GrammarCompiler(info).compile_regex("([a-f]{1,3}(ghi|jklmn)[o-v]){1,4}")


def processor(kind: str, length: int) -> Any:
    """One for the text after a prompt of so many tokens."""
    if kind.startswith("fails"):
        return Fails(length + int(kind.split()[1]))
    if kind == "xgrammar" and xgrammar is not None:
        return xgrammar.contrib.hf.LogitsProcessor(pattern())
    return FormProcessor(length) if kind in ("form", "xgrammar") else Processor(kind)


class Scheduled(Batcher):
    """A batcher that does things before some of its rounds, on the thread that runs them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rounds = 0
        self.schedule: dict[int, list[Callable[[], None]]] = defaultdict(list)
        self.most_at_once = self.most_held = 0

    def _round(self) -> None:
        self.rounds += 1
        for action in self.schedule.pop(self.rounds, []):
            action()
        super()._round()
        self.most_at_once = max(self.most_at_once, self.running)
        held = [call.request.most for call in self._running]
        self.most_held = max(self.most_held, len(held) * max(held, default=0))


@dataclass
class Drawn:
    """A request: when it comes, and after how many rounds it is cancelled, if it is; `drafting` changes no text."""

    inputs: dict[str, torch.Tensor]
    options: dict[str, Any]
    processors: list[str]
    criteria: list[str]
    drafting: dict[str, Any]
    seed: int
    comes: int
    stays: int | None

    @property
    def fails(self) -> bool:
        return any(one.startswith("fails") for one in self.processors)

    def made(self) -> dict[str, Any]:
        """What it asks for, with processors and criteria of its own."""
        length, made = self.inputs["input_ids"].shape[1], dict[str, Any]()
        if self.processors:
            made["logits_processor"] = [processor(kind, length) for kind in self.processors]
        if self.criteria:
            made["stopping_criteria"] = [Criterion(kind) for kind in self.criteria]
        return {**self.options, **made}


def draw(random: Random, number: int, memory: SuffixStore, drafts: list[dict[str, Any]]) -> Drawn:
    length = random.choice([1, 3, 7, 12, 20, 33])
    options: dict[str, Any] = {"do_sample": random.random() < 0.7, "max_new_tokens": random.choice([1, 6, 14, 30])}
    if options["do_sample"]:
        options |= random.choice([{"top_k": 0}, {"top_k": 0}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}])
    if random.random() < 0.3:
        options |= {"return_dict_in_generate": True, "output_scores": True}
    options |= random.choice([{}, {"eos_token_id": [3, 11], "pad_token_id": 0}, {"repetition_penalty": 1.3}])
    options |= random.choice([{}, {}, {}, {"stop_strings": ["q", "xy", "B"], "tokenizer": TOKENIZER}])
    kinds = ["reads ids", "keeps count", "in place", "looks across rows"], ["form", "xgrammar", "xgrammar"]
    one, grammar = (random.choice(some) for some in kinds)
    processors = random.choice([[], [], [f"fails {random.randint(0, 30)}"], [one], [grammar], [one, grammar]])
    criteria = random.choice([[], [], [], ["ends rows"], ["keeps count"]])
    drafting = random.choice([{}, {"memory": memory}, {"memory": memory.namespace("ada")}])
    drafting |= random.choice([*[{}] * 8, *drafts])
    stays = random.choice([None, None, None, 0, 1, 4])
    inputs = prompts([length], seed=number)
    if random.random() < 0.5:  # a system prompt
        begins = prompts([random.choice([9, 9, 30])])
        inputs = {name: torch.cat([begins[name], inputs[name]], dim=1) for name in inputs}
    return Drawn(inputs, options, processors, criteria, drafting, number, random.randint(1, 25), stays)


def run(batcher: Scheduled, requests: list[Drawn]) -> list[Handle]:
    """Submit all of them, each before the round in which it comes."""
    handles: dict[int, Handle] = {}

    def submit(number: int) -> None:
        one = requests[number]
        handles[number] = batcher.submit(**one.inputs, **one.made(), **one.drafting, seed=one.seed)
        if one.stays is not None:
            batcher.schedule[batcher.rounds + 1 + one.stays].append(handles[number].cancel)

    for number, request in enumerate(requests):
        batcher.schedule[request.comes].append(partial(submit, number))
    while len(handles) < len(requests):
        first = min(batcher.schedule)  # nothing runs now: go on at the next thing to do
        for action in batcher.schedule.pop(first):
            action()
        while (thread := batcher._thread) is not None:
            thread.join()
    batcher.close()
    return [handles[number] for number in range(len(requests))]


def check(target: Any, request: Drawn, handle: Handle) -> None:
    """The request has its own text, as far as it came."""
    fails = request.fails
    request.processors = [] if fails else request.processors
    wanted = compare.run(target, request.inputs, request.seed, **request.made())
    text = wanted.sequences[0, request.inputs["input_ids"].shape[1] :].tolist()
    assert handle.tokens == text[: len(handle.tokens)]
    if handle.cancelled():
        assert request.stays is not None
        with pytest.raises(CancelledError):
            list(handle)
    elif (failure := handle.exception()) is not None:
        if not (fails and isinstance(failure, OwnError)):
            raise failure
    else:
        found = handle.result()
        assert [*handle] == text
        compare.same(compare.Run(found, wanted.state), wanted)
        assert isinstance(found, torch.Tensor) or found.draft_stats is handle.stats


@pytest.mark.parametrize(
    ("family", "drafter", "seed"),
    [
        *product(["llama"], [*MAKERS, "some tokens", "lookup", "none"], [0]),
        ("gemma3", "dart", 0),
        pytest.param("qwen3_5", "dart", 0, marks=needs_running_states),
        *(
            pytest.param(*case, marks=[pytest.mark.matrix, needs_running_states])
            for case in product(("llama", "gemma3", "gpt2", "mixtral", "qwen3_5"), DRAFTERS, range(12))
            if case[0] == "llama" or case[1] not in ("mtp", "gemma4")
            if case[:2] != ("qwen3_5", "language model")  # one with running states drafts for nobody
        ),
    ],
)
def test_each_writes_what_it_writes_alone(
    family: str, drafter: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, value in (batcher_module, "PIECE", 5), (prefixes_module, "_LEAST", 4), (learning, "_LESSON", 64):
        monkeypatch.setattr(module, name, value)
    random = Random(f"{seed} {drafter}")
    target, head = pair(drafter, family) if drafter in (*MAKERS, *PARTS) else (tiny_target(family), None)
    head = LookupDrafter() if drafter == "lookup" else head
    learner = None
    if drafter in ("dart", "eagle") and random.random() < 0.6:
        learner = Learner(share=0.5, every=2, learning_rates=(3e-3,))
        learner.attach(head)
    seats, store = random.choice([2, 3, 5]), SuffixStore()
    bounds = {"max_tokens": random.choice([200, 250, 1000]), "prefix_tokens": random.choice([0, 20, 100])}
    batcher = Scheduled(target, head, seats=seats, **bounds)
    trees = TreeConfig(nodes=4), TreeConfig(nodes=20, refine=2 * (drafter == "some tokens"))
    drafts = [{"tree_config": tree} for tree in trees]
    drafts += [{"assistant": other} for other in (LookupDrafter(), tiny_head(target))]
    requests = [draw(random, 100 * seed + number, store, drafts) for number in range(14)]
    before = torch.get_rng_state()
    handles = run(batcher, requests)
    assert torch.equal(torch.get_rng_state(), before)
    for request, handle in zip(requests, handles, strict=True):
        check(target, request, handle)
    assert batcher.most_held <= batcher.max_tokens
    assert (batcher.running, batcher.waiting) == (0, 0)
    if (family, seed) == ("llama", 0):
        assert store.tokens > 0
        assert batcher.most_at_once > 1
    if learner is not None:
        assert learner.failure is None
        assert learner.stats.steps > 0 or learner.stats.tokens <= 64
    if (drafter, seed) == ("dart", 0):
        done = [handle.stats for handle in handles if handle.stats is not None]
        assert sum(stats.tokens for stats in done) > 1.3 * sum(stats.row_rounds for stats in done)


def test_threads_that_submit_at_the_same_time() -> None:
    target = tiny_target("llama")
    with Batcher(target, tiny_head(target), seats=3) as batcher, ThreadPoolExecutor(4) as clients:

        def ask(number: int) -> torch.Tensor:
            handle = batcher.submit(**prompts([4 + number], seed=number), **SAMPLED, seed=number)
            torch.rand(3)  # a user's own draws do not matter
            list(handle)
            return handle.result(timeout=60)

        found = list(clients.map(ask, range(20)))
    for number, text in enumerate(found):
        wanted = compare.run(target, prompts([4 + number], seed=number), number, **SAMPLED)
        assert torch.equal(text, wanted.sequences)


def test_requests_in_a_row_run_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the next one, as a new thread's memory would be new, too; closing ends the wait."""
    monkeypatch.setattr(batcher_module, "_IDLE", 600.0)
    threads = []
    with Batcher(tiny_target("llama")) as batcher:
        for _ in range(2):
            batcher.submit([3, 4], do_sample=False, max_new_tokens=3).result()
            threads.append(batcher._thread)
    assert threads[0] is threads[1]
    assert batcher._thread is None


def test_first_come_first_served() -> None:
    """A small request does not overtake one that waits for room."""
    target, order = tiny_target("llama"), list[str]()
    batcher = Scheduled(target, tiny_head(target), seats=4, max_tokens=100)
    sizes = {"first": 40, "second": 80, "third": 4}

    def submit() -> None:
        for name, size in sizes.items():
            handle = batcher.submit(**prompts([5]), do_sample=False, max_new_tokens=size)
            handle.add_done_callback(lambda _, name=name: order.append(name))

    batcher.schedule[1].append(submit)
    batcher.submit(**prompts([5]), do_sample=False, max_new_tokens=9).result()
    batcher.close()
    assert order == [*sizes]
    assert batcher.most_held == 90


def test_refusals() -> None:
    target = tiny_target("llama")
    batcher = Batcher(target, tiny_head(target), max_tokens=50)
    for options, words in (
        ({"num_beams": 2}, "pass num_beams=1"),
        ({"num_return_sequences": 2, "do_sample": True}, "has 2 rows"),
        ({"max_new_tokens": 46}, "may hold 51 tokens, 5 of its prompt"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "Hidden states are not"),
    ):
        with pytest.raises(ValueError, match=words):
            batcher.submit(**prompts([5]), **{"max_new_tokens": 9, **options})
    for prompt in "abc", 5, None, TOKENIZER("abc"), [[3], [4, 5]]:
        with pytest.raises(TypeError, match=r"A prompt is a row of token ids, not .*; give tokenizer"):
            batcher.submit(prompt)
    assert batcher._thread is None
    batcher.close()
    with pytest.raises(RuntimeError, match="make another one"):
        batcher.submit([3, 4])
    for bound, words in ({"seats": 0}, "seats is 0; .* from 1 on"), ({"prefix_tokens": -1}, "is -1; .* from 0 on"):
        with pytest.raises(ValueError, match=words):
            Batcher(target, **bound)


def test_cancelled_requests_wait_no_longer() -> None:
    """Behind one that waits in earnest, too."""
    target, going_on = tiny_target("llama"), Event()

    def hold(ids: Tensor, scores: Tensor) -> Tensor:
        going_on.wait(60)
        return scores

    with Batcher(target, tiny_head(target), seats=1) as batcher:
        handles = [batcher.submit(**prompts([5]), **GREEDY, logits_processor=[hold]) for _ in range(2)]
        for _ in range(9):
            batcher.submit(**prompts([5]), **GREEDY).cancel()
        assert len(batcher._waiting) < 4
        going_on.set()
        assert torch.equal(*(handle.result(timeout=60) for handle in handles))


def test_processors_that_draw() -> None:
    """Processors that draw would share the generator of the tokens, which is not the default one here."""
    target = tiny_target("llama")
    with Batcher(target, tiny_head(target)) as batcher:
        good = batcher.submit(**prompts([5]), **SAMPLED, seed=3, guidance_scale=1.5)  # runs the target once more
        bad = batcher.submit(**prompts([5]), **SAMPLED, logits_processor=[Processor("draws")])
    with pytest.raises(ValueError, match="draws random numbers"):
        bad.result()
    wanted = compare.run(target, prompts([5]), 3, **SAMPLED, guidance_scale=1.5)
    assert torch.equal(good.result(), wanted.sequences)


def test_a_processor_that_exits_ends_its_own_request_alone() -> None:
    target, failing = tiny_target("llama"), list[Handle]()
    batcher = Scheduled(target, tiny_head(target))
    given = {"logits_processor": [Fails(9, SystemExit)]}
    batcher.schedule[2].append(lambda: failing.append(batcher.submit(**prompts([4]), **GREEDY, **given)))
    other = batcher.submit(**prompts([5]), **GREEDY).result(timeout=60)
    assert torch.equal(other, target.generate(**prompts([5]), **GREEDY))
    with pytest.raises(SystemExit):
        failing[0].result(timeout=60)
    batcher.close()
    assert batcher.most_at_once == 2


def test_callbacks_that_fail_end_nothing() -> None:
    """Such as one that calls an event loop which has been closed meanwhile."""
    target, told = tiny_target("llama"), list[int]()

    def fails() -> None:
        told.append(0)
        if len(told) == 2:  # it is called when it is added, too
            raise OwnError

    with Scheduled(target, tiny_head(target)) as batcher:
        batcher.schedule[2].append(lambda: batcher._running[0].handle.add_news_callback(fails))
        for handle in [batcher.submit(**prompts([5]), **GREEDY) for _ in range(2)]:
            assert torch.equal(handle.result(timeout=60), target.generate(**prompts([5]), **GREEDY))
    assert len(told) == 2, "it is not called again"


def test_a_thread_that_was_kept_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C, say; the next request starts one, and a batcher without one can be closed."""
    target = tiny_target("llama")
    batchers = Batcher(target), Batcher(target)
    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", lambda thread: fail(Stopped))
        for batcher in batchers:
            with pytest.raises(Stopped):
                batcher.submit(**prompts([5]), **GREEDY)
    batchers[0].close()
    found = batchers[1].submit(**prompts([5]), **GREEDY).result(timeout=60)
    assert torch.equal(found, target.generate(**prompts([5]), **GREEDY))
    batchers[1].close()


def test_a_forward_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that shared it fail; those that come later do not."""
    target, own = tiny_target("llama"), Verifier.__call__
    batcher = Scheduled(target, tiny_head(target))

    def verify(self: Verifier, *args: Any) -> Any:
        if batcher.rounds == 2:
            raise MemoryError("gone")
        return own(self, *args)

    monkeypatch.setattr(Verifier, "__call__", verify)
    handles, store = [], SuffixStore()
    batcher.schedule[1].append(lambda: handles.append(batcher.submit(**prompts([4]), **GREEDY)))
    handles.append(batcher.submit(**prompts([5]), **GREEDY, memory=store))
    for handle in handles:
        with pytest.raises(MemoryError):
            handle.result(timeout=60)
    assert len(handles) == 2
    assert store.tokens > 5, "what it wrote until then is kept"
    assert not batcher._seats.taken
    later = batcher.submit(**prompts([5]), **GREEDY)
    batcher.close()
    assert torch.equal(later.result(), target.generate(**prompts([5]), **GREEDY))


@pytest.mark.parametrize(
    ("length", "known", "options", "running"),
    [(8, 0, {}, [2, 3, 4]), (16, 0, {"prefill_chunk_size": 16}, [2, 3, 4]), (45, 2, {}, [4, 4, 4])],
    ids=["of a piece", "read whole", "after a beginning"],
)
def test_rounds_between_prompts(
    length: int, known: int, options: dict[str, Any], running: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run wait for as many tokens as a piece has, whatever prompts these are of."""
    monkeypatch.setattr(batcher_module, "PIECE", 8)
    target, held, sizes, in_pieces = tiny_target("llama"), list[int](), list[int](), batcher_module.in_pieces
    monkeypatch.setattr(batcher_module, "in_pieces", lambda *given: sizes.append(given[1]) or in_pieces(*given))
    batcher, given = Scheduled(target), {**prompts([length]), **GREEDY, **options}
    for _ in range(known):
        batcher.submit(**given).result(timeout=60)
    first = batcher.rounds
    batcher.schedule[first + 2].append(lambda: [batcher.submit(**given) for _ in range(3)])
    for number in (3, 4, 5):
        batcher.schedule[first + number].append(lambda: held.append(len(batcher._running)))
    batcher.submit(**prompts([3]), **GREEDY).result(timeout=60)
    batcher.close()
    assert held == running
    assert sizes == [32] * (known + 1) + [8] * 3  # larger where nobody waits


def test_requests_that_are_cancelled_make_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has a seat, and one whose prompt is being read."""
    monkeypatch.setattr(batcher_module, "PIECE", 4)
    target = tiny_target("llama")
    batcher, handles, held = Scheduled(target, tiny_head(target)), list[Handle](), []
    options = {"do_sample": False, "max_new_tokens": 60}
    for length in (3, 40):
        batcher.schedule[1].append(lambda of=length: handles.append(batcher.submit(**prompts([of]), **options)))
    batcher.schedule[4] += [lambda: handles[0].cancel(), lambda: handles[1].cancel()]
    for number in (3, 6):
        batcher.schedule[number].append(lambda: held.append((batcher.running, len(batcher._seats.taken))))
    batcher.submit(**prompts([4]), **options).result(timeout=60)
    batcher.close()
    assert held == [(3, 2), (1, 1)]


def test_requests_that_are_cancelled_do_not_wait() -> None:
    """Nor do others that wait before them hold them."""
    target = tiny_target("llama")
    batcher, handles, held = Scheduled(target, tiny_head(target), seats=1), list[Handle](), list[int]()
    options = {**prompts([4]), "do_sample": False, "max_new_tokens": 30}
    batcher.schedule[1] += [lambda: handles.append(batcher.submit(**options))] * 2
    batcher.schedule[2].append(lambda: handles[1].cancel())
    batcher.schedule[3].append(lambda: held.append(batcher.waiting))
    batcher.submit(**options).result(timeout=60)
    batcher.close()
    assert held == [1]


def test_a_request_that_goes_beyond_the_table_of_positions() -> None:
    """As it would take those that share its forward with it, it runs alone."""
    target, handles = tiny_target("gpt2"), list[Handle]()  # which has 256
    batcher = Scheduled(target, tiny_head(target))
    options = {"do_sample": False, **prompts([240])}
    for new in 40, 17, 17:
        batcher.schedule[2].append(lambda new=new: handles.append(batcher.submit(**options, max_new_tokens=new)))
    batcher.submit(**options, max_new_tokens=17).result(timeout=60)
    batcher.close()
    with pytest.raises(IndexError):
        handles[0].result()
    for handle in handles[1:]:
        assert torch.equal(handle.result(), target.generate(**options, max_new_tokens=17))
    assert batcher.most_at_once == 2


def test_a_streamer_that_fails_at_the_end() -> None:
    """The memory has taken in the text, as from `generate`."""
    target, store, streamer = tiny_target("llama"), SuffixStore(), Listener()
    streamer.end = fail  # type: ignore[method-assign]
    with Batcher(attach(target, memory=store)) as batcher, pytest.raises(OwnError):
        batcher.submit(**prompts([5]), **GREEDY, streamer=streamer).result()
    assert store.tokens > 5


def test_closing_cancels_what_is_not_done() -> None:
    target = attach(tiny_target("llama"))
    handles = []

    def broken() -> None:
        with Batcher(target, seats=1) as batcher:
            handles.extend(batcher.submit(**prompts([5]), do_sample=False, max_new_tokens=3000) for _ in range(3))
            raise OwnError

    with pytest.raises(OwnError):
        broken()
    assert len(handles) == 3
    assert all(handle.cancelled() for handle in handles)
    assert handles[0].cancel()
    assert wait(handles, timeout=10).done == set(handles)


def test_drafter_and_memory_of_an_attached_model() -> None:
    """Requests may have other trees, and no memory; those of one shape run at a time."""
    target, store = tiny_target("llama"), SuffixStore()
    attach(target, tiny_head(target), memory=store)
    with Batcher(target) as batcher:
        shapes: list[dict[str, Any]] = [{"memory": None}, {}, {"tree_config": TreeConfig(nodes=2)}]
        handles = [batcher.submit([3, 4, 5], **GREEDY, **shape) for shape in shapes]
        undrafted = batcher.submit([3, 4, 5], **GREEDY, assistant=None, memory=None)
    wanted = type(target).generate(target, torch.tensor([[3, 4, 5]]), **GREEDY)
    for handle in handles:
        assert torch.equal(handle.result(), wanted)
        assert handle.stats is not None
        assert handle.stats.drafted > 0
    assert handle.stats.drafted <= handle.stats.rounds
    assert torch.equal(undrafted.result(), wanted)
    assert undrafted.stats is not None
    assert undrafted.stats.drafted == 0
    assert store.tokens >= 23
    assert store.names == [""]


def test_requests_in_inference_mode() -> None:
    """With a cache that counts in a tensor of its own, and prompts that no gradient goes through."""
    target = tiny_target("llama")
    options = {**GREEDY, "cache_implementation": "static"}
    with torch.inference_mode(), Batcher(target, tiny_head(target)) as batcher:
        inputs = prompts([7])
        handle = batcher.submit(**inputs, **options)
        assert torch.equal(handle.result(), type(target).generate(target, **inputs, **options))


def test_requests_run_under_the_autocast_that_they_were_submitted_under() -> None:
    target, seen = tiny_target("llama", dtype=torch.float32), list[torch.dtype]()

    def look(head: Any, inputs: Any, logits: torch.Tensor) -> None:
        if current_thread() is not main_thread():  # where trials run
            seen.append(logits.dtype)

    target.lm_head.register_forward_hook(look)
    with Batcher(target, tiny_head(target)) as batcher:
        handles = [batcher.submit(**prompts([5]), **GREEDY) for _ in range(2)]
        with torch.autocast("cpu", torch.bfloat16):
            batcher.submit(**prompts([5]), **GREEDY)
        handles.append(batcher.submit(**prompts([5]), **GREEDY))
    assert [dtype for dtype, _ in groupby(seen)] == [torch.float32, torch.bfloat16, torch.float32]
    stock = target.generate(**prompts([5]), **GREEDY)
    assert all(torch.equal(handle.result(), stock) for handle in handles)


def test_weights_are_read_by_requests_that_overlap_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is cancelled has ended, although its seat is taken until the next round."""
    target, read = tiny_target("llama", dtype=torch.float32), []

    def contents(weights: Iterable[torch.Tensor]) -> list[tuple[int, ...]]:
        weights = [*weights]
        read.extend(one for one in weights if one is target.lm_head.weight)
        return devices.contents_of(weights)

    monkeypatch.setattr(packed_weights, "_LEAST", 1)
    for module in (packed_weights, prefixes_module):
        monkeypatch.setattr(module, "contents_of", contents)
    batcher, handles = Scheduled(target, tiny_head(target)), list[Handle]()
    options: dict[str, Any] = {**prompts([40]), **GREEDY}

    def change() -> None:
        batcher._running[0].handle.cancel()
        target.model.layers[0].mlp.down_proj.weight.data.mul_(2.0)
        handles.append(batcher.submit(**options))

    for number in (2, 3):
        batcher.schedule[number].append(lambda: handles.append(batcher.submit(**options)))
    first = batcher.submit(**options).result(timeout=60)
    assert torch.equal(first, target.generate(**options))
    assert all(torch.equal(handle.result(timeout=60), first) for handle in handles)
    assert packed_weights._known[target].linear
    assert len(read) == 2, "by packed weights, and by beginnings that are shared"
    batcher.schedule[batcher.rounds + 2].append(change)
    batcher.submit(**options)
    while (thread := batcher._thread) is not None:
        thread.join()
    last = handles[-1].result(timeout=60)
    assert not torch.equal(last, first)
    assert torch.equal(last, target.generate(**options))
