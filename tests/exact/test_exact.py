"""The contract: the same tokens as stock `generate`, and the generator left where stock leaves it.

All in float64 without tolerance, unless a test says otherwise.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from support.cases import FAMILIES, MODES, batch, replay
from support.compare import assert_identical, run, tally
from support.tiny import WINDOW, prompts, tiny_head, tiny_target

from hf_dart import TreeConfig

pytestmark = pytest.mark.usefixtures("executor")
EXACT = tally("float64, tiny random targets", least=1.3)


ONLY_EAGER = ["gemma2", "gpt_oss", "phi3", "gemma3n", "gemma4_shared", "llama4", "gptj", "opt"]


@pytest.mark.parametrize(
    ("executor", "family", "attention"),
    [
        *product(("called", "captured"), FAMILIES, ("sdpa",)),
        *product(("called", "captured"), ONLY_EAGER, ("eager",)),
        *product(("called",), FAMILIES, ("eager",)),
    ],
    indirect=["executor"],
)
def test_families(executor: str, family: str, attention: str) -> None:
    """By a head and by drafts that are mostly right, every mode with one row and with four."""
    target = tiny_target(family, attention)
    head = tiny_head(target)
    for index, (mode, options) in enumerate(MODES.items()):
        options = {**options, "max_new_tokens": 24}
        sizes = (1, 4) if index % 2 else (4, 1)
        assert_identical(target, head, batch(sizes[0], attention), into=EXACT, **options)
        if attention == "sdpa" or mode == "several EOS":
            inputs, misses = batch(sizes[1], attention), [0.1, 0.6, 0.3, 0.9][: sizes[1]]
            assert_identical(target, replay(target, inputs, misses=misses, **options), inputs, into=EXACT, **options)


def test_up_to_the_end_of_the_position_table() -> None:
    table = 32
    target = tiny_target("gpt2", n_positions=table)
    head = tiny_head(target)
    for size in (1, 4):
        inputs = batch(size, "sdpa")
        # The last token is not run through the model: one more than the table fits.
        for length in (table - 1, table, table + 1):
            for mode in ("greedy", "T=1"):
                assert_identical(target, head, inputs, max_length=length, **MODES[mode])
            # Rows that end early are filled up for the cache that is returned.
            kept = {"return_dict_in_generate": True, "max_length": length}
            assert_identical(target, head, inputs, seed=length - table, **kept, **MODES["several EOS"])
        options = {"do_sample": False, "max_length": table + 1}
        drafter = replay(target, inputs, misses=[0.0, 0.3, 0.0, 0.0][:size], **options)
        assert_identical(target, drafter, inputs, **options)


@pytest.mark.parametrize("executor", ["called"], indirect=True)  # calls of a target with hooks are not captured
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma3", "llama4"])
def test_a_root_that_sees_all_needs_no_mask(family: str) -> None:
    """Rounds without a draft then take stock's own attention; after a window, or beside shorter rows, they do not."""
    model = tiny_target(family)
    head = tiny_head(model)
    head.tree_config = TreeConfig(nodes=1)
    masks: list[bool] = []

    def note(module: Any, given: Any, named: dict[str, Any]) -> None:
        if named["input_ids"].shape[1] == 1:
            mask = named.get("attention_mask")
            masks.append(mask is None or (isinstance(mask, dict) and all(one is None for one in mask.values())))

    for lengths, mode in (([5], "greedy"), ([5, 5], "T=1"), ([5, 3], "greedy")):
        options = {**MODES[mode], "max_new_tokens": 12}
        stock, _ = assert_identical(model, head, prompts(lengths), **options)
        handle = model.register_forward_pre_hook(note, with_kwargs=True)
        run(model, prompts(lengths), 0, assistant=head, max_new_tokens=2)  # tries what the target has become
        masks.clear()
        assert torch.equal(run(model, prompts(lengths), 0, assistant=head, **options).sequences, stock.sequences)
        handle.remove()
        windowed = family in ("mixtral", "gemma3", "llama4")
        alike = len(set(lengths)) == 1
        until = (WINDOW - 5 if windowed else 11) if alike else 0
        assert masks == [True] * until + [False] * (11 - until)
