"""A memory of earlier calls: it changes what is drafted and no token, keeps what it says, and forgets it."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support.attacks import as_one_line, attack, seeds
from support.cases import GREEDY, SAMPLED
from support.compare import assert_identical, run, same
from support.memory import resident
from support.sentences import refused
from support.tiny import VOCABULARY, prompts, tiny_head, tiny_target
from support.users import fail, letters

from hf_dart import LookupDrafter, SuffixStore, TreeConfig, attach, detach
from hf_dart.decoding import suffix_store
from hf_dart.trees import copies
from hf_dart.trees.copies import LONGEST, RowCopies, TextIndex

KEPT = {"return_dict_in_generate": True, "output_scores": True}
FREE = TreeConfig(node_cost=0.0, draft_cost=0.0)


@pytest.fixture(scope="module")
def target() -> Any:
    return attach(tiny_target("llama"))


def texts_in(store: SuffixStore) -> list[list[int]]:
    """Stored texts, oldest first."""
    tokens = store._index.tokens[np.arange(max(store._index.end - store._index.capacity, 1), store._index.end)
                                 % store._index.capacity]  # fmt: skip
    texts = np.split(tokens, np.flatnonzero(tokens == 0))
    return [text for text in ((part[part > 0] % 2**32 - 1).tolist() for part in texts) if text]


def copied(store: SuffixStore, text: list[int], name: str = "") -> list[list[int]]:
    """Tokens that a call in a namespace is told to have followed the end of a text."""
    base = store.namespace(name).base
    rows, _ = store.matches([base + token + 1 for token in text[-LONGEST:]], 3)
    return [[token % 2**32 - 1 for token in row] for row in rows]


# ---- the text is the same ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", [[9], [9, 3, 7]], ids=["one", "three"])
def test_text_and_generators_are_stocks(target: Any, lengths: list[int], options: dict[str, Any]) -> None:
    """Call after call over one store, the same prompts and others; what is known already is accepted."""
    calls, options = [(0, prompts(lengths)), (1, prompts(lengths)), (0, prompts([12]))], {**options, **KEPT}
    stock = [run(target, inputs, seed, **options) for seed, inputs in calls]
    for drafter in (tiny_head(target), LookupDrafter()):
        store, taus = SuffixStore(), []
        for number in (0, 0, 1, 2, 0):
            seed, inputs = calls[number]
            ours = run(target, inputs, seed, **options, assistant=drafter, tree_config=FREE, memory=store)
            same(ours, stock[number])
            taus.append(drafter.last_stats.tau)
        assert taus[1] > taus[0]
        assert min(taus[1], taus[-1]) > 4
        assert store.tokens > 5 * 24


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_that_mislead_change_nothing(target: Any, options: dict[str, Any]) -> None:
    """Stock's own text with every third token another one, its ends in the middle, and tokens of padding."""
    inputs, store = prompts([9, 4]), SuffixStore()
    stopping = {"eos_token_id": [5, 11], "pad_token_id": 0}
    random = Random(0)
    for ends in ({}, stopping):
        text = run(target, inputs, 0, **options, **ends).sequences.tolist()
        for row in text:
            for first in range(3):
                store.add("", [random.randrange(VOCABULARY) if at % 3 == first else t for at, t in enumerate(row)])
                store.add("", [*row[: first + 12], 5, *row[first + 12 :], 0, 0, 0])
    for ends in ({}, stopping):
        assert_identical(target, LookupDrafter(), inputs, **options, **ends, **KEPT, tree_config=FREE, memory=store)


def test_processors_and_criteria_of_the_users_go_step_by_step(target: Any) -> None:
    """Rows in step, one of which has ended and runs on: what they hold after their ends is not kept."""
    store, inputs = SuffixStore(), prompts([9, 9])
    ends = [lambda ids, scores, **_: torch.tensor([ids.shape[1] >= 15, ids.shape[1] >= 25])]
    options = {**GREEDY, "stopping_criteria": ends, "tree_config": FREE, "memory": store}
    for _ in range(2):
        stock, _ = assert_identical(target, LookupDrafter(), inputs, **options)
    assert [len(text) for text in texts_in(store)[:2]] == [15, 25]
    assert texts_in(store)[1] == stock.sequences[1, :25].tolist()


def test_threads_share_a_store(target: Any) -> None:
    store, inputs = SuffixStore(1 << 16), [prompts([9]), prompts([5, 8]), prompts([12]), prompts([3])]
    alone = [run(target, one, 0, **GREEDY).sequences for one in inputs]

    def calls(number: int) -> None:
        for turn in range(6):
            one, part = (number + turn) % len(inputs), store.namespace(f"{number % 2}")
            output = target.generate(**inputs[one], **GREEDY, assistant=LookupDrafter(FREE), memory=part)
            assert torch.equal(output, alone[one])
            if number == 3:
                store.forget("1")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(calls, range(4)))
    assert store.tokens > 0


# ---- what is kept -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_a_call_is_kept_when_it_ends_or_breaks_off(target: Any, failure: type[BaseException]) -> None:
    """Tokens that came until then are kept; of a call that fails before its first token nothing is."""
    store, inputs = SuffixStore(), prompts([9])
    sequences = target.generate(**prompts([9, 4]), **GREEDY, assistant=LookupDrafter(), memory=store)
    assert texts_in(store) == [sequences[0].tolist(), sequences[1, 5:].tolist()]
    store.forget()
    other = attach(tiny_target("llama", vocab_size=VOCABULARY + 16))
    other.generate(**inputs, **GREEDY, assistant=LookupDrafter(), memory=store)  # an empty one takes any vocabulary
    store.forget()
    whole = run(target, inputs, 0, **GREEDY).sequences[0].tolist()
    fails = [lambda ids, scores, **_: fail(failure) if ids.shape[1] >= 20 else torch.tensor([False])]
    with pytest.raises(failure):
        target.generate(**inputs, **GREEDY, assistant=LookupDrafter(), memory=store, stopping_criteria=fails)
    assert texts_in(store) == [whole[:20]]
    with pytest.raises(ValueError, match="cannot be drafted"):
        target.generate(**inputs, **GREEDY, assistant=LookupDrafter(), memory=store, output_attentions=True)
    assert len(texts_in(store)) == 1
    assert_identical(target, LookupDrafter(), inputs, **GREEDY, memory=store)


def test_what_is_stored_is_not_stored_once_more() -> None:
    """Turns of a conversation, each with all before it; every place of them is still found."""
    random, store = Random(0), SuffixStore()
    talk = [random.randrange(1000) for _ in range(200)]
    for _ in range(6):
        store.add("", talk)
        store.add("", talk)
        talk = talk + [random.randrange(1000) for _ in range(150)]
    held = 200 + 5 * (150 + LONGEST)
    assert store.tokens == held
    for place in range(3, 945):
        assert talk[place : place + 3] in copied(store, talk[:place])
    store.add("", [*talk[:100], 5, 6, 7])
    assert store.tokens == held + LONGEST + 3, "a text that goes on differently"
    store.add("", talk[:50])
    assert store.tokens == held + LONGEST + 53, "short ones are"
    store.add("ada", talk[:200])
    assert store.tokens == held + LONGEST + 253, "and those of another namespace"


def test_the_oldest_texts_make_room() -> None:
    store, random = SuffixStore(1 << 16), Random(0)
    capacity = store._index.capacity
    texts = [[random.randrange(10**6) for _ in range(100)] for _ in range(50)]
    for number, text in enumerate(texts):
        store.add(str(number % 3), text)
    assert capacity - 2 * LONGEST - 50 < store.tokens <= capacity
    assert capacity * 20 <= store.most_bytes
    assert [copied(store, text[:50], str(number % 3)) for number, text in enumerate(texts[:10])] == [[]] * 10
    for number, text in enumerate(texts[-20:], 30):
        assert copied(store, text[:50], str(number % 3)) == [text[50:53]]
    store.add("", list(range(10**5)))
    assert copied(store, [99_000, 99_001]) == [[99_002, 99_003, 99_004]]


def test_memory_is_taken_up_as_it_fills() -> None:
    """An empty store costs next to nothing, as the system gives pages when they are first written."""
    gc.collect()
    before = resident()
    stores = [SuffixStore(1 << 28) for _ in range(4)]
    assert resident() - before < (1 << 28) * len(stores) / 4


# ---- namespaces -------------------------------------------------------------------------------------------


def test_namespaces_never_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all runs of tokens have one hash, so that every chain goes through every text."""
    store, random = SuffixStore(), Random(1)
    monkeypatch.setattr(TextIndex, "_slot", lambda self, run: 0)
    for name in "abc":
        for _ in range(4):
            store.add(name, [random.randrange(4) + 10 * "abc".index(name) for _ in range(10)])
    assert store.names == ["a", "b", "c"]
    for number, name in enumerate("abcd"):
        for text in [[10 * k + 1] for k in range(3)] + [[10 * k, 10 * k + 3] for k in range(3)]:
            for row in copied(store, text, name):
                assert text[0] // 10 == number
                assert all(token == -1 or token // 10 == number for token in row[:1])
    assert any(copied(store, [10 * k + 1], name) for k, name in enumerate("abc"))


def test_forgetting(target: Any) -> None:
    store, inputs = SuffixStore(), prompts([9])
    drafter = LookupDrafter(FREE)
    for name in ("ada", "bob"):
        target.generate(**inputs, **SAMPLED, assistant=drafter, memory=store.namespace(name))
    store.namespace("ada").forget()
    assert store.names == ["bob"]
    number, tokens = store.number("bob"), store._index.tokens
    assert set((tokens[tokens > 0] >> 32).tolist()) == {number}, "nothing of it lies in memory"
    assert store.number("ada") not in (number, 1), "its number is not given again"
    assert len({store.number(name) for name in ("ada", "bob", "cid", "dan")}) == 4
    assert_identical(target, drafter, inputs, **SAMPLED, memory=store.namespace("ada"))
    assert drafter.last_stats.tau < 4
    store.forget("nobody")
    store.forget()
    assert (store.names, store.tokens) == ([], 0)
    assert store.chances() == pytest.approx(list(suffix_store.PRIOR))


def test_names_without_texts_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_store, "_NAMES", 8)
    store = SuffixStore(1 << 16)
    for number in range(3000):
        store.add(f"user {number}", [number] * 50)
    assert len(store._numbers) < 200
    assert {token for row in copied(store, [2999, 2999], "user 2999") for token in row} == {2999, -1}


# ---- chances ----------------------------------------------------------------------------------------------


def test_a_store_learns_what_is_right(target: Any) -> None:
    """Rows of ended calls tell it to calls that begin later."""
    store = SuffixStore()
    before = store.chances()
    for seed in range(3):
        run(target, prompts([9, 7]), seed, **GREEDY, assistant=LookupDrafter(FREE), memory=store)
    after = store.chances()
    assert after != before
    assert all(chance >= 0 for chance in after)
    assert RowCopies([1, 2, 3], store.namespace(""))._prior == after
    store.learn([500.0] * len(after), [10_000.0] * len(after))
    assert all(chance == pytest.approx(0.05, rel=0.1) for chance in store.chances())
    assert store._counts.seen.max() <= copies._MOST_SEEN


# ---- how it is given --------------------------------------------------------------------------------------


def test_attached_once_it_serves_every_drafted_call() -> None:
    target = tiny_target("llama")
    head, inputs, store = tiny_head(target), prompts([9]), SuffixStore()
    attach(target, head, memory=store)
    stock = run(target, inputs, 0, **SAMPLED, assistant=None)
    assert store.tokens == 0, "stock's own calls are not kept"
    for more in ({}, {"assistant": LookupDrafter()}):
        tokens = store.tokens
        same(run(target, inputs, 1, **SAMPLED, memory=None, **more), run(target, inputs, 1, **SAMPLED, assistant=None))
        assert store.tokens == tokens, "memory=None turns it off"
        store.forget()
        same(run(target, inputs, 0, **SAMPLED, **more), stock)
        assert store.tokens == 33
    attach(target)
    store.forget()
    same(run(target, inputs, 0, **SAMPLED), stock)
    assert store.tokens == 33, "attaching again leaves it"
    detach(target)
    assert "generate" not in vars(target)


def test_a_memory_alone_drafts_by_copies() -> None:
    """Copies of the model share it, and pickles begin an empty one."""
    target, inputs, store = tiny_target("llama"), prompts([9]), SuffixStore(1 << 20)
    stock = run(target, inputs, 0, **SAMPLED)
    attach(target, memory=store.namespace("ada"))
    for _ in range(2):
        same(run(target, inputs, 0, **SAMPLED), stock)
    assert store.names == ["ada"]
    assert target.generate.default.last_stats.tau > 2
    held = store.tokens
    copy.deepcopy(target).generate(**prompts([5]), **GREEDY)
    assert store.tokens > held
    loaded = pickle.loads(pickle.dumps(target))
    assert (loaded.generate.memory.store.tokens, loaded.generate.memory.store.most_bytes) == (0, 1 << 20)
    same(run(loaded, inputs, 0, **SAMPLED), stock)


def test_what_is_no_memory_is_refused(target: Any) -> None:
    inputs, drafter, store = prompts([9]), LookupDrafter(), SuffixStore()
    target.generate(**inputs, **GREEDY, assistant=drafter, memory=store)
    other = attach(tiny_target("llama", vocab_size=VOCABULARY + 16))
    wrong: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: target.generate(**inputs, **GREEDY, assistant=drafter, memory={}),
            "takes a SuffixStore, not dict; give memory=SuffixStore",
        ),
        (lambda: attach(target, memory=True), "takes a SuffixStore"),
        (lambda: target.generate(**inputs, **GREEDY, memory=SuffixStore()), "this call has no drafter"),
        (lambda: SuffixStore(5), "most_bytes is 5; give 65536 or more"),
        (lambda: SuffixStore().namespace(7), "named by a string, not 7"),  # type: ignore[arg-type]
        (
            lambda: other.generate(**inputs, **GREEDY, assistant=drafter, memory=store),
            "each tokenizer a store of its own",
        ),
    ]
    for call, words in wrong:
        refused(call, (TypeError, ValueError), words)
    assert_identical(target, drafter, inputs, **GREEDY, memory=store)


# ---- files ------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> tuple[SuffixStore, Path]:
    """A store of three namespaces, one of them forgotten, of a ring that has gone round, and its file.

    Token 12 is an image's, beyond the vocabulary.
    """
    store, random = SuffixStore(1 << 16), Random(0)
    for number in range(90):
        store.add(("", "ada", "gone")[number % 3], [random.randrange(13) for _ in range(60)])
    store._vocab_size = 12
    store.learn([1.0] * 48, [9.0] * 48)
    store.forget("gone")
    path = tmp_path / "memory.safetensors"
    store.save(path, tokenizer=letters("abcdefghijkl"))
    return store, path


def test_a_store_comes_back_from_its_file(saved: tuple[SuffixStore, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    store, path = saved
    monkeypatch.setattr(suffix_store, "_NAMES", 1)  # more are in the file
    for loaded in (SuffixStore.load(path, tokenizer=letters("abcdefghijkl")), SuffixStore.load(path)):
        assert loaded.names == store.names == ["", "ada"]
        assert loaded.tokens == store.tokens
        assert texts_in(loaded) == texts_in(store)
        assert loaded.chances() == store.chances()
        assert loaded._vocab_size == store._vocab_size == 12
        for name, text in zip(("ada", ""), texts_in(store)[:-3:-1], strict=True):
            assert text[3:6] in copied(loaded, text[:3], name)
            assert text[3:6] not in copied(loaded, text[:3], "gone")
    loaded.save(again := path.parent / "new" / "again.safetensors")
    np.testing.assert_equal(load_file(again), load_file(path))
    SuffixStore().save(path)
    assert SuffixStore.load(path).tokens == 0


def test_a_smaller_store_takes_the_latest_texts(tmp_path: Path) -> None:
    store, path = SuffixStore(), tmp_path / "memory.safetensors"
    for number in range(200):
        store.add("", [number * 100 + at for at in range(60)])
    store.save(path)
    loaded = SuffixStore.load(path, most_bytes=1 << 16)
    assert texts_in(loaded)[-20:] == texts_in(store)[-20:]
    assert loaded.tokens < store.tokens
    assert copied(loaded, [19_901, 19_902]) == [[19_903, 19_904, 19_905]]


def test_files_of_others_are_refused(saved: tuple[SuffixStore, Path], tmp_path: Path) -> None:
    _, path = saved
    weights, newer = tmp_path / "weights.safetensors", tmp_path / "newer.safetensors"
    save_file({"a": np.zeros(3)}, weights)
    save_file(load_file(path), newer, {"format": "hf_dart.memory", "version": "2"})
    for file, words in (
        (path, "holds texts of another tokenizer; give"),
        (tmp_path / "none", "There is no file .*; SuffixStore\\.save writes one"),
        (weights, "cannot be read as a SuffixStore"),
        (newer, "no SuffixStore of version 1"),
    ):
        refused(lambda file=file: SuffixStore.load(file, tokenizer=letters("lkjihgfedcba")), ValueError, words)
    with pytest.raises(OSError, match=r"memory\.safetensors"):
        SuffixStore().save(path / "in a file")


@pytest.mark.parametrize("part", seeds(120, 3000))
def test_damaged_files(saved: tuple[SuffixStore, Path], part: range) -> None:
    _, path = saved
    assert attack(path, as_one_line(lambda: SuffixStore.load(path)), part) > 0


def test_parts_that_do_not_fit_each_other_are_refused(saved: tuple[SuffixStore, Path]) -> None:
    _, path = saved
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    good, middle = load_file(path), len(load_file(path)["tokens"]) // 2
    wrong: list[tuple[str, Any]] = [
        ("tokens", good["tokens"].astype(np.int64)),
        ("tokens", good["tokens"] * -1),
        ("tokens", good["tokens"][:-1]),
        ("tokens", np.append(np.int32(0), good["tokens"])),
        ("tokens", np.insert(good["tokens"], middle, [3, 0, 0])),
        ("owners", good["owners"][1:]),
        ("owners", good["owners"] + np.int32(1)),
        ("owners", good["owners"] - np.int32(1)),
        ("right", good["right"] * np.nan),
        ("right", good["right"] - 100),
        ("seen", good["seen"] * 0),
        ("seen", good["seen"][1:]),
    ]
    changes = [({name: np.ascontiguousarray(array)}, {}) for name, array in wrong]
    changes += [({}, {"names": names}) for names in ('["", ""]', "[1, 2]", "{}", "7", "[[", '[""]')]
    for arrays, told in changes:
        save_file({**good, **arrays}, path, {**metadata, **told})
        with pytest.raises(ValueError, match=r"is damaged \(.*\); save it again"):
            SuffixStore.load(path)
    save_file(good, path, metadata)
    assert SuffixStore.load(path).tokens > 0
