"""Many prompts: outputs in order, prompts taken late, errors that stay with their prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from support.cases import GREEDY, SAMPLED
from support.compare import run
from support.tiny import prompts, tiny_head, tiny_target
from support.users import TOKENIZER
from transformers import LogitsProcessor

from hf_dart import generate_many, iterate_many
from hf_dart.models.verify import Verifier
from hf_dart.serve.many import ManyFailedError
from hf_dart.trees.tree import DraftTree


def test_outputs_in_order() -> None:
    target = tiny_target("llama")
    inputs = [prompts([3 + 2 * (number % 7)], seed=number) for number in range(12)]
    wanted = [run(target, one, 5 + number, **SAMPLED).sequences for number, one in enumerate(inputs)]
    listed = [{name: values[0].tolist() for name, values in one.items()} for one in inputs]  # as a tokenizer's own
    given = [(one, lists, lists["input_ids"])[n % 3] for n, (one, lists) in enumerate(zip(inputs, listed, strict=True))]
    for asked, seed in ((given, numpy.int64(5)), (iter(given), numpy.arange(5, 17))):
        found = generate_many(target, asked, tiny_head(target), seats=3, seed=seed, progress=False, **SAMPLED)
        assert all(map(torch.equal, found, wanted))


def test_prompts_are_taken_late() -> None:
    target, taken = tiny_target("llama"), []

    def source() -> Iterator[str]:
        for number in range(40):
            taken.append(number)
            yield "abcdefg"[number % 5 :]

    many = iterate_many(target, source(), seats=2, seed=0, tokenizer=TOKENIZER, **SAMPLED)
    assert not taken
    for number in range(6):
        handle = next(many)
        inputs = TOKENIZER("abcdefg"[number % 5 :], return_tensors="pt")
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        assert torch.equal(handle.result(), run(target, inputs, number, **SAMPLED).sequences)
        assert len(taken) == number + 4
    many.close()  # and nothing more is taken
    assert len(taken) == 9


class Counts(LogitsProcessor):
    """Keeps state from call to call, and fails at its seventh."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 7 and input_ids[0, 0] == 9:
            raise OSError("gone")
        return scores.roll(self.calls, -1)


def test_a_prompt_that_fails() -> None:
    target = tiny_target("llama")
    given = [[5, 4, 3], [9, 8], [7], [], [6, 5]]
    with pytest.raises(ManyFailedError, match="2 of 5 prompts failed") as failed:
        generate_many(target, given, tiny_head(target), seats=2, logits_processor=[Counts()], progress=False, **GREEDY)
    assert [type(one) for one in failed.value.exceptions] == [OSError, ValueError]
    assert failed.value.exceptions[1].__notes__ == ["The error of prompt 3, counted from 0."]
    for prompt, output in zip(given, failed.value.outputs, strict=True):
        if prompt in ([9, 8], []):
            assert output is None
        else:
            wanted = type(target).generate(target, torch.tensor([prompt]), logits_processor=[Counts()], **GREEDY)
            assert torch.equal(output, wanted)
    with pytest.raises(ValueError, match="pass num_beams=1"):
        generate_many(target, given, num_beams=2, progress=False)


def test_an_error_that_several_prompts_share(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Verifier.__call__

    def verify(self: Verifier, tree: DraftTree, *args: Any) -> Any:
        if len(tree.tokens) == 2:
            raise MemoryError("gone")
        return own(self, tree, *args)

    monkeypatch.setattr(Verifier, "__call__", verify)
    with pytest.raises(ManyFailedError, match="2 of 3 prompts failed") as failed:
        generate_many(tiny_target("llama"), [[5, 4], [9], [7]], seats=2, progress=False, max_new_tokens=100)
    (failure,) = failed.value.exceptions
    assert failure.__notes__ == [f"The error of prompt {place}, counted from 0." for place in range(2)]


def test_what_is_no_list_of_prompts() -> None:
    target = tiny_target("llama")
    for given, options, words in (
        ("abc", {}, "prompts= is one str"),
        (TOKENIZER(["a", "b"]), {}, "prompts= is one BatchEncoding"),
        ([[{"role": "user", "content": "a"}]], {}, "apply_chat_template"),
        ([[3], [4]], {"seed": [0]}, "fewer seeds than"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            generate_many(target, given, tokenizer=TOKENIZER, progress=False, **{**options, **GREEDY})
