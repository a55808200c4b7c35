"""Offline, one thread per test (the models are tiny), and the session's figures at the end, of all processes."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # also of the processes that tests start

from typing import Any

import pytest

pytest.register_assert_rewrite("support")

from support.tallies import TALLIES, tally  # noqa: E402, after their assertions are rewritten


def pytest_collection() -> None:
    """Import what takes long where tests are run, and not before pytest-xdist has started the processes for that."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _known_generator_state() -> None:
    """Tests do not depend on their order."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds cost what they are estimated to, so that equal calls make equal rounds, however busy the machine is."""
    from hf_dart.decoding.pace import Pace

    monkeypatch.setattr(Pace, "timed_costs", lambda *_: frozenset())


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `gpu` run on a simulated one where there is none."""
    import torch
    from support.simulated_gpu import simulated_gpu

    if request.node.get_closest_marker("gpu") is None or torch.cuda.is_available():
        yield
    else:
        with simulated_gpu():
            yield


@pytest.fixture(scope="module", autouse=True)
def _drafts_were_accepted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Accepted drafts of the runs of a file are counted, where the whole of it is run."""
    before = {one.title: len(one.taus) for one in TALLIES.values()}
    yield
    options = request.config.option
    if "not matrix" in options.markexpr and not options.keyword and not any("::" in it for it in request.config.args):
        for one in TALLIES.values():
            assert len(one.taus) == before.get(one.title, 0) or one.mean_tau > one.least, one


@pytest.fixture(params=["called", "captured"])
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test in both executors: on fixed shapes whatever can run there, uncompiled."""
    if request.param == "captured":
        from support.engines import Everywhere

        from hf_dart.drafters.base import Drafter

        monkeypatch.setattr(Drafter, "engine", Everywhere())
    return str(request.param)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Let all calls of a function be noted from here on: `noted(owner, name, lambda *arguments: note)`.

    With `result=True` a note is made when the function has returned, and what it returned is the first argument.
    """

    def note_calls(owner: Any, name: str, note: Callable[..., Any], result: bool = False) -> list[Any]:
        plain, notes = getattr(owner, name), list[Any]()

        @functools.wraps(plain)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not result:
                notes.append(note(*args, **kwargs))
            found = plain(*args, **kwargs)
            if result:
                notes.append(note(found, *args, **kwargs))
            return found

        monkeypatch.setattr(owner, name, watched)
        return notes

    return note_calls


@pytest.fixture
def taken_up(noted: Any) -> list[bool]:
    """Answers, of every call, whether it went on with a draft."""
    from hf_dart.decoding import session

    return noted(session, "resume_state", lambda draft, *_: draft is not None, result=True)


@pytest.fixture
def full_fp32() -> Iterator[None]:
    import torch

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist hand out files in the order of their collection, in place of that of their numbers of tests."""
    config.option.loadscopereorder = False


LONGEST = ("test_tensor_parallel", "test_fuzz_generate", "test_nothing_leaks", "test_serve", "test_serving")
"""Files that take long; where all processes are at work, none of them is to be left for the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_collection_finish() -> None:
    """What was imported stays: collections, of which engines and trainers ask for many, need not go through it.

    Nor need they come by themselves every 700 objects, which takes a tenth of the tests' time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_sessionfinish(session: pytest.Session) -> None:
    handed_on = getattr(session.config, "workeroutput", None)  # where pytest-xdist runs this process
    if handed_on is not None:
        handed_on["tallies"] = [(one.title, one.taus, one.near_ties) for one in TALLIES.values()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for title, taus, near_ties in getattr(node, "workeroutput", {}).get("tallies", []):
        tally(title).taus += taus
        tally(title).near_ties += near_ties


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for one in TALLIES.values():
        if one.taus:
            terminalreporter.write_line(str(one))
