"""Every family × attention × batch, drafted against stock, as a table.

    PYTHONPATH=tests:examples/experiments python examples/experiments/surveys/matrix.py

`tests/MATRIX.md` is its output; `pytest -m matrix` runs the same cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from support.cases import MODES, replay
from support.compare import Tally, assert_identical, assert_identical_up_to_near_ties
from support.families import FAMILIES, HYBRIDS, REFUSED
from support.tiny import prompts, tiny_head, tiny_target
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

from hf_dart import TreeConfig, attach
from hf_dart.models.stock_steps import cache_after, cache_name
from hf_dart.models.verify import mask_kinds

RUN = ("greedy", "T=1")
TESTED = {**FAMILIES, **HYBRIDS}
TOKENS = 32
# Prompts that begin inside a sliding window, or after it.
ONE_ROW = [7]
# A random head's drafts are never worth their cost: a tree of its own size keeps it drafting.
_TREE = TreeConfig(nodes=16)
LEVEL, RAGGED = [9, 9, 9, 9], [2, 17, 9, 30]


@dataclass(frozen=True)
class Column:
    """One way to run a family.

    Under eager attention stock itself gives NaN for padded rows in float64, as it computes softmax in fp32: those
    run in fp32, under the rule for near-ties.
    """

    attention: str
    dtype: torch.dtype
    prompts: list[int]

    def __str__(self) -> str:
        rows = len(self.prompts)
        padded = ", padded" if len(set(self.prompts)) > 1 else ""
        return f"{self.attention}, {rows} row{'s' * (rows > 1)}{padded}{' (fp32)' * (self.dtype == torch.float32)}"


COLUMNS = [
    Column("eager", torch.float64, ONE_ROW),
    Column("eager", torch.float64, LEVEL),
    Column("eager", torch.float32, RAGGED),
    Column("sdpa", torch.float64, ONE_ROW),
    Column("sdpa", torch.float64, RAGGED),
]


@dataclass
class Cell:
    """What the runs of one family in one column add up to."""

    runs: int = 0
    total: Tally = field(default_factory=lambda: Tally(""))

    def __str__(self) -> str:
        ties = f", {len(self.total.near_ties)} near-ties" if self.total.near_ties else ""
        return f"{self.runs}/{self.runs}{ties}"


def attentions(family: str) -> list[str]:
    """What stock can run the family with; sdpa is not in all older code."""
    model = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[TESTED[family][0]]]
    return ["eager", "sdpa"] if model._supports_sdpa else ["eager"]


CELLS = [
    (family, column)
    for family in TESTED
    if TESTED[family][0] in CONFIG_MAPPING  # older releases have fewer
    for column in COLUMNS
    if column.attention in attentions(family)
]


def run_cell(family: str, column: Column, seed: int = 0, make: Callable[[Any], Any] = tiny_head) -> Cell:
    """Greedy and sampled, with a random drafter (of `make`) and with a drafter that is mostly right.

    Raises:
        AssertionError: a run differs from stock's, or the generator is left elsewhere.
    """
    target = tiny_target(family, column.attention, column.dtype, seed)
    head = make(target)
    head.tree_config = _TREE
    cell = Cell()
    inputs = prompts(column.prompts, seed)
    for mode in RUN:
        options = {**MODES[mode], "max_new_tokens": TOKENS}
        known = replay(target, inputs, misses=[0.1, 0.6, 0.3, 0.9][: len(column.prompts)], seed=seed, **options)
        for drafter in (head, known):
            if column.dtype == torch.float64:
                assert_identical(target, drafter, inputs, seed=seed, into=cell.total, **options)
            else:
                assert_identical_up_to_near_ties(
                    target, drafter, inputs, seed=seed, into=cell.total, label=f"{family}, {mode}", **options
                )
            cell.runs += 1
    return cell


def refusal(family: str) -> str:
    """The sentence with which a family is refused.

    Raises:
        AssertionError: it is not.
    """
    try:
        attach(tiny_target(family, "eager"))
    except ValueError as refused:
        return str(refused)
    raise AssertionError(f"{family} is not refused")


def mask_form(family: str) -> str:
    """Which kinds of layers the family's tiny target has, as its masks are named."""
    target = tiny_target(family, "eager")
    cache = DynamicCache(config=target.config)
    outputs = target(**prompts([3]), **{cache_name(target): cache}, use_cache=True)
    kinds = mask_kinds(target, cache_after(target, outputs, cache))
    masks = [kind.name.removesuffix("_attention") for kind in kinds]
    return " + ".join(masks + ["states"] * (family in HYBRIDS))


def table() -> Iterator[str]:
    """The lines of `MATRIX.md`."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, CPU"
    yield "# Families against stock `generate`"
    yield ""
    command = "PYTHONPATH=tests:examples/experiments python examples/experiments/surveys/matrix.py"
    yield f"Printed by `{command}` ({versions})."
    yield "A cell counts runs whose tokens, and the generator after them, equal stock's:"
    yield f"{' and '.join(RUN)}, each with a random head and with a drafter that is mostly right, {TOKENS} tokens;"
    yield "in float64 without tolerance unless a column says fp32. The last column is the mean over the runs of τ,"
    yield "tokens committed per target forward."
    yield ""
    yield "| family | masks | " + " | ".join(map(str, COLUMNS)) + " | τ |"
    yield "|---" * (len(COLUMNS) + 3) + "|"
    counted, everything = 0, Tally("")
    for family in TESTED:
        cells, total = [], Tally("")
        for column in COLUMNS:
            if column.attention in attentions(family):
                cell = run_cell(family, column)
                cells.append(str(cell))
                counted += cell.runs
                total.taus += cell.total.taus
                everything.near_ties += cell.total.near_ties
            else:
                cells.append("stock has none")
        everything.taus += total.taus
        yield f"| {family} | {mask_form(family)} | " + " | ".join(cells) + f" | {total.mean_tau:.2f} |"
    yield ""
    ties = len(everything.near_ties)
    yield f"{counted} runs; {ties} differences, at near-ties of stock's own in fp32; mean τ {everything.mean_tau:.2f}."
    yield ""
    yield "## Refused"
    yield ""
    yield "| family | with |"
    yield "|---|---|"
    for family in REFUSED:
        yield f"| {family} | {refusal(family)} |"
    yield ""
    yield "Single calls are refused where rotary frequencies would change on"
    yield "the way, and where a text reaches a length at which the model no longer follows positions (Llama 4's"
    yield "tempered attention after 8192 slots): `tests/models/test_trial.py`."


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for line in table():
        print(line, flush=True)
