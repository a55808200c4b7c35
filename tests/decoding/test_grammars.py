"""Grammars asked ahead of a text: what they force is drafted, and no token of the output changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import Run, assert_identical, run, same, tally
from support.tiny import VOCABULARY, prompts, tiny_eagle_drafter, tiny_head, tiny_target
from support.users import FORM, Form, FormProcessor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dart import LookupDrafter, attach
from hf_dart.decoding import grammars
from hf_dart.decoding.grammars import RowGrammar
from hf_dart.decoding.stats import DraftStats
from hf_dart.drafters.base import Proposal
from hf_dart.hub.loading import PACKAGED_TARGET
from hf_dart.trees.copies import NOTHING, Copies


@pytest.fixture(scope="module")
def target() -> Any:
    return attach(tiny_target("llama"))


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("lengths", [[6], [6, 3, 5]])
def test_forced_tokens_are_drafted(target: Any, lengths: list[int], sample: bool) -> None:
    options = {"do_sample": sample, "max_new_tokens": 40, "logits_processor": [FormProcessor(max(lengths))]}
    drafters: list[tuple[Any, float]] = [(LookupDrafter(), 2.0), (tiny_head(target), 1.3)]
    stock = run(target, prompts(lengths), 0, **options)
    for drafter, least in drafters:
        same(run(target, prompts(lengths), 0, **options, assistant=drafter), stock)
        assert drafter.last_stats.tau > least, drafter.last_stats.tau


@pytest.mark.parametrize("make", [partial(tiny_head, selector_rank=4), tiny_eagle_drafter])
def test_neighbours_are_scored_among_what_is_allowed(target: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, tables = make(target), []
    own = drafter.transitions
    monkeypatch.setattr(drafter, "transitions", lambda *given: tables.append(own(*given)) or tables[-1])
    options = {"do_sample": False, "max_new_tokens": 20, "logits_processor": [FormProcessor(6)]}
    assert_identical(target, drafter, prompts([6]), **options)
    assert not any(table.isnan().any() for table in tables)
    assert any(table.isinf().any() for table in tables), "where nothing is allowed"


@pytest.mark.usefixtures("executor")
def test_ends_and_new_calls(target: Any) -> None:
    """A token of the grammar ends the text; the next call begins at the start of the grammar."""
    total = tally("grammar that ends", least=1.2)
    options = {"do_sample": True, "max_new_tokens": 40, "eos_token_id": [8, 12], "pad_token_id": 0}
    for seed in range(4):
        processors = [FormProcessor(6)]
        inputs = prompts([6, 4], seed)
        assert_identical(target, LookupDrafter(), inputs, seed=seed, into=total, logits_processor=processors, **options)


def row_after(text: list[int], form: type[Form] = Form, prompt: int = 1) -> RowGrammar:
    row = RowGrammar(form(), text[:prompt])
    row._text = text
    return row


def proposal(vocabulary: list[int] | None = None) -> Proposal:
    columns = VOCABULARY if vocabulary is None else len(vocabulary)
    logits = torch.randn(1, 5, columns, generator=torch.Generator().manual_seed(0))
    return Proposal(logits, logits, None if vocabulary is None else torch.tensor(vocabulary))


@pytest.mark.parametrize("vocabulary", [None, [1, 2, 5, 6, 8, 9, 20], [1, 2, 5, 6]])
def test_drafts_hold_what_is_allowed(vocabulary: list[int] | None) -> None:
    text = [1, 1, 5]
    row = row_after(text, prompt=2)
    assert row.copies(NOTHING, 4).tokens == [6, 7]
    draft = proposal(vocabulary)
    before = draft.logits.clone()
    row.restrict(draft, 0)
    tokens = vocabulary or range(VOCABULARY)
    for depth, allowed in enumerate([{6}, {7}, FORM[3]]):
        left = {token for token, logit in zip(tokens, draft.logits[0, depth], strict=True) if logit.isfinite()}
        assert left == ({*tokens} & allowed or {*tokens}), depth  # where the drafter has none, it goes unchanged
    assert torch.equal(draft.logits[0, 3:], before[0, 3:])  # after a token that is free, nothing is known
    text += [6, 7, 8]
    draft = proposal()
    row.restrict(draft, 0)  # no copies were asked for here: one depth
    assert draft.logits[0].isfinite().sum(-1).tolist() == [1, *[VOCABULARY] * 4]


def test_copies_that_are_not_allowed_are_left_out() -> None:
    totals = [-0.1 * node for node in range(7)]
    copies = Copies([3, 20, 9, 2, 10, 9, 4], [-1, -1, 0, 1, 2, 0, 5], [1, 1, 2, 2, 3, 2, 3], totals)
    found = row_after([1, 5, 6, 7]).copies(copies, 8)
    assert (found.tokens, found.parents, found.depths) == ([3, 9, 10, 9], [-1, 0, 1, 0], [1, 2, 3, 2])
    assert found.totals == [0.0, -0.2, -0.4, -0.5]


def test_what_did_not_come_is_less_likely() -> None:
    class Wrong(Form):
        def forced(self, text: Sequence[int]) -> list[int]:
            return [5, 6]

    text = [1]
    row = row_after(text, Wrong)
    first = row.copies(NOTHING, 4).totals
    for _ in range(20):
        text.append(7)
        later = row.copies(NOTHING, 4).totals
    assert later[0] < first[0] - 0.5


# ---- the processors of other packages -----------------------------------------------------------------------

SORTED = {
    "type": "object",
    "properties": {"number": {"enum": [1, 20, 300]}, "sorted": {"type": "boolean"}},
    "required": ["number", "sorted"],
    "additionalProperties": False,
}
ROWS = {"type": "array", "minItems": 2, "maxItems": 2, "items": SORTED}
NAMED = {"name": {"type": "string", "maxLength": 6}, "rows": ROWS}
SCHEMA = {"type": "object", "properties": NAMED, "required": ["name", "rows"], "additionalProperties": False}


def compiled(tokenizer: Any, size: int, schema: Any = SCHEMA) -> Any:
    """The grammar of a schema by xgrammar."""
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    return xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema), any_whitespace=False)


def reset(processor: Any) -> dict[str, Any]:
    """A processor of outlines goes on with another text when it is told to."""
    processor.reset()
    return {"logits_processor": [processor]}


def xgrammar_processor(tokenizer: Any, size: int, schemas: Any = None) -> Any:
    """One grammar for all rows, or one for each."""
    given = compiled(tokenizer, size) if schemas is None else [compiled(tokenizer, size, one) for one in schemas]
    from xgrammar.contrib.hf import LogitsProcessor

    return lambda: {"logits_processor": [LogitsProcessor(given)]}


def outlines_xgrammar_processor(tokenizer: Any, size: int) -> Any:
    grammar = compiled(tokenizer, size)
    pytest.importorskip("outlines")
    from outlines.backends.xgrammar import XGrammarLogitsProcessor

    return partial(reset, XGrammarLogitsProcessor(grammar, "torch"))


def llguidance_processor(tokenizer: Any, size: int) -> Any:
    llguidance = pytest.importorskip("llguidance")
    pytest.importorskip("outlines")
    from llguidance.hf import from_tokenizer
    from outlines.backends.llguidance import LLGuidanceLogitsProcessor

    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), defaults={"whitespace_flexible": False})
    return partial(reset, LLGuidanceLogitsProcessor(grammar, from_tokenizer(tokenizer, n_vocab=size), "torch"))


def outlines_processor(tokenizer: Any, size: int) -> Any:
    pytest.importorskip("outlines")
    pytest.importorskip("outlines_core")
    from outlines.backends.outlines_core import OutlinesCoreBackend, OutlinesCoreLogitsProcessor
    from outlines.models import Transformers

    form = r'\{"name": "[a-z]{1,4}", "rows": \[(true|false), (true|false)\]\}'
    index = OutlinesCoreBackend(Transformers(SimpleNamespace(), tokenizer)).get_regex_logits_processor(form).index
    return partial(reset, OutlinesCoreLogitsProcessor(index, "torch"))


def enforcer(tokenizer: Any, size: int) -> Any:
    """By lm-format-enforcer itself: what it has for transformers does not import with transformers 5."""
    pytest.importorskip("lmformatenforcer")
    from lmformatenforcer import JsonSchemaParser, TokenEnforcer, TokenEnforcerTokenizerData

    words = [(token, tokenizer.decode([token]), False) for token in range(size) if token != tokenizer.eos_token_id]
    data = TokenEnforcerTokenizerData(words, tokenizer.decode, tokenizer.eos_token_id, False, size)
    held = TokenEnforcer(data, JsonSchemaParser(SCHEMA))
    return lambda: {"prefix_allowed_tokens_fn": lambda _, text: held.get_allowed_tokens(text.tolist()).allowed_tokens}


ASKED = [xgrammar_processor, outlines_xgrammar_processor, llguidance_processor, outlines_processor]
"""Processors whose grammars are asked ahead; the last one does not say for how many tokens it is."""


@pytest.fixture(scope="module")
def packaged() -> tuple[Any, Any]:
    """The packaged target, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED_TARGET)
    return attach(AutoModelForCausalLM.from_pretrained(PACKAGED_TARGET, dtype=torch.float64)), tokenizer


STOCKS: dict[Any, Run] = {}
"""What stock writes, for both executors; its masks take as long as all of a drafted call."""


def drafted(packaged: Any, make: Any, texts: list[str], sample: bool) -> DraftStats:
    """Write after texts what stock does, and return what came of the drafts."""
    (model, tokenizer), seed, known = packaged, len(texts), (make, len(texts), sample)
    options, copies = make(tokenizer, model.config.vocab_size), LookupDrafter()
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    inputs = {**inputs, "do_sample": sample, "max_new_tokens": 60}
    if known not in STOCKS:
        STOCKS[known] = run(model, inputs, seed, **options())
    same(run(model, inputs, seed, **options(), assistant=copies), STOCKS[known])
    return copies.last_stats


@pytest.mark.usefixtures("executor")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of those packages
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize(("make", "least"), [*zip(ASKED, (1.5, 1.5, 1.5, 1.2), strict=True), (enforcer, 1.0)])
def test_processors_of_other_packages(packaged: Any, make: Any, least: float, sample: bool) -> None:
    for texts in (["import json\nrow = "], ["import json\nrow = ", "x = "]):
        tau = drafted(packaged, make, texts, sample).tau
        assert tau > least, tau


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", ASKED)
def test_texts_that_part_from_one_another(packaged: Any, make: Any) -> None:
    """Asked about them in turn, a grammar says what one says that has never been asked."""
    model, tokenizer = packaged
    (processor,) = make(tokenizer, model.config.vocab_size)()["logits_processor"]
    asked, texts = grammars._grammar(processor, 0), [[], []]
    for place, text in zip((0, -1), texts, strict=True):
        for _ in range(12):
            text.append(int(np.asarray(asked.allowed(text))[place]))
    one, other = texts
    assert one != other
    for text in (one, other, one[:5], [*other[:9], 0, 0], other, [], one):
        new = grammars._grammar(processor, 0)
        assert [*asked.allowed(text)] == [*new.allowed(text)]
        assert [*asked.forced(text)] == [*grammars._grammar(processor, 0).forced(text)]


@pytest.mark.parametrize("make", ASKED[:3])
def test_a_grammar_of_another_tokenizer(packaged: Any, make: Any) -> None:
    model, tokenizer = packaged
    size = model.config.vocab_size
    options = make(tokenizer, size + 900)()
    with pytest.raises(ValueError, match=f"tokenizer of {size + 900} tokens, and the target has {size}; compile"):
        run(model, tokenizer("row = ", return_tensors="pt"), 1, assistant=LookupDrafter(), **options)


@pytest.mark.parametrize(("count", "rows"), [(2, 1), (2, 3), (3, 2)])
def test_grammars_of_other_rows(packaged: Any, count: int, rows: int) -> None:
    model, tokenizer = packaged
    options = xgrammar_processor(tokenizer, model.config.vocab_size, [ROWS] * count)()
    inputs = tokenizer(["row = "] * rows, return_tensors="pt")
    with pytest.raises(ValueError, match=f"^The processor has {count} grammars for {rows} rows of text; give one"):
        run(model, inputs, 1, assistant=LookupDrafter(), **options)


BY_ROW = partial(xgrammar_processor, schemas=[SCHEMA, SORTED, ROWS])


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("sample", [False, True])
def test_rows_of_other_grammars_go_on_apart(packaged: Any, sample: bool) -> None:
    """A processor of xgrammar does for each row what one for that row alone does."""
    committed = drafted(packaged, BY_ROW, ["row = ", "x = ", "data = "], sample).committed
    assert any(len({*counts} - {0}) > 1 for counts in committed), "no row waits for the others"
