"""Many prompts: outputs in order, prompts taken late, errors that stay with their prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.tiny import prompts, tiny_head, tiny_target
from support.users import TOKENIZER
from transformers import LogitsProcessor

from hf_dart import generate_many, iterate_many
from hf_dart.serve.many import ManyFailedError

SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 14}


def alone(target: Any, inputs: Any, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return type(target).generate(target, **inputs, **SAMPLED)


def test_outputs_in_order() -> None:
    target = tiny_target("llama")
    inputs = [prompts([3 + 2 * (number % 7)], seed=number) for number in range(12)]
    wanted = [alone(target, one, 5 + number) for number, one in enumerate(inputs)]
    head = tiny_head(target)
    given = [one["input_ids"][0].tolist() if number % 2 else one for number, one in enumerate(inputs)]
    found = generate_many(target, given, head, seats=3, seed=5, progress=False, **SAMPLED)
    assert all(map(torch.equal, found, wanted))
    found = generate_many(target, iter(given), head, seats=3, seed=range(5, 17), progress=False, **SAMPLED)
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
        wanted = alone(target, {name: inputs[name] for name in ("input_ids", "attention_mask")}, number)
        assert torch.equal(handle.result(), wanted)
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
    target, options = tiny_target("llama"), {"do_sample": False, "max_new_tokens": 12}
    given = [[5, 4, 3], [9, 8], [7], [], [6, 5]]
    with pytest.raises(ManyFailedError, match="2 of 5 prompts failed") as failed:
        generate_many(target, given, tiny_head(target), seats=2, logits_processor=[Counts()], progress=False, **options)
    assert [type(one) for one in failed.value.exceptions] == [OSError, ValueError]
    assert failed.value.exceptions[1].__notes__ == ["The error of prompt 3, counted from 0."]
    for prompt, output in zip(given, failed.value.outputs, strict=True):
        if prompt in ([9, 8], []):
            assert output is None
        else:
            wanted = type(target).generate(target, torch.tensor([prompt]), logits_processor=[Counts()], **options)
            assert torch.equal(output, wanted)
    with pytest.raises(ValueError, match="leave out num_beams=2"):
        generate_many(target, given, num_beams=2, progress=False)
