"""`View`: one call of `generate` as a page of HTML that loads nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import dropwhile
from math import exp
from pathlib import Path
from typing import Any

from jinja2 import Environment

from hf_dart.serve.detokenizer import Detokenizer

_PAGE = Path(__file__).with_name("view.html")


@dataclass(frozen=True)
class View:
    """Page about one row of `generate(..., assistant=drafter, trace=True, return_dict_in_generate=True)`.

    In a notebook it shows itself; `save` writes it to a file.

    Attributes:
        tokenizer: of the target.
        prompt: token ids.
        tokens: generated ids.
        stats: the `hf_dart.decoding.stats.DraftStats` of the call, with its trace.
        row: which row of the batch this is.
        notes: sentences for the top of the page.
    """

    tokenizer: Any
    prompt: list[int]
    tokens: list[int]
    stats: Any
    row: int = 0
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, output: Any, tokenizer: Any, row: int = 0, notes: tuple[str, ...] = ()) -> View:
        """Return the view of one row of what `generate(..., trace=True, return_dict_in_generate=True)` returned.

        Raises:
            ValueError: the call kept no trace, or has no such row.
        """
        stats = getattr(output, "draft_stats", None)
        if stats is None or stats.trace is None:
            raise ValueError("There is no trace; give what generate(trace=True, return_dict_in_generate=True) returns.")
        sequences = output.sequences
        if not 0 <= row < len(sequences):
            raise ValueError(f"row is {row}; give one of 0..{len(sequences) - 1}.")
        ids = sequences[row].tolist()
        start = stats.trace.prompt_length
        # The prefill wrote one token, the rounds the others; what stands after them is padding.
        written = 1 + sum(len(one.paths[row]) for one in stats.trace.rounds)
        prompt = list(dropwhile(lambda token: token == tokenizer.pad_token_id, ids[:start]))
        return cls(tokenizer, prompt, ids[start : start + written], stats, row, notes)

    @property
    def rounds(self) -> list[Any]:
        """The rounds of the call, in order: each a `hf_dart.decoding.stats.TracedRound`."""
        return self.stats.trace.rounds

    def save(self, file: str | Path) -> None:
        """Write the page to a file, which any browser opens."""
        Path(file).write_text(self.html(), encoding="utf8", errors="replace")

    def _repr_html_(self) -> str:
        # A frame of its own: the page's style must not reach the notebook's. Without a base, links would lead to a
        # place in the notebook.
        page = escape(self.html().replace("<head>", '<head>\n<base href="about:srcdoc" />', 1), quote=True)
        return f'<iframe srcdoc="{page}" sandbox="" style="width: 100%; height: 42em; border: 1px solid #ddd"></iframe>'

    def html(self) -> str:
        """Return the page as HTML, with nothing to load and no script."""
        page = Environment(autoescape=True, finalize=_printable).from_string(_PAGE.read_text(encoding="utf8"))
        texts = token_texts(self.tokenizer, self.prompt[-8:], self.tokens)
        owners = origins(len(self.tokens), [len(one.paths[self.row]) for one in self.rounds])
        pieces = [(text, *owner) for text, owner in zip(texts, owners, strict=True)]
        return page.render(view=self, summary=self.stats._repr_html_(), pieces=pieces, trees=[*self._trees()])

    def _trees(self) -> Iterator[dict[str, Any]]:
        """Yield what the page says of each round that committed something."""
        written = 1
        for number, one in enumerate(self.rounds, start=1):
            count = len(one.paths[self.row])
            if not count:
                continue
            written += count
            last = self._label(self.tokens[written - 1])
            yield {
                "number": number,
                "accepted": count - 1,
                "drafted": sum(parent >= 0 for parent in one.parents[self.row]),
                "last": last,
                "spent": ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in one.seconds.items()),
                "tree": self._tree(one, last),
            }

    def _tree(self, one: Any, bonus: str) -> dict[str, Any]:
        """Return the nodes of a round's tree, to be drawn from left to right: the accepted path on top."""
        tokens, parents, path = one.tokens[self.row], one.parents[self.row], one.paths[self.row]
        scores = None if one.scores is None else one.scores[self.row]

        def drawn(node: int) -> dict[str, Any]:
            children = [child for child, parent in enumerate(parents) if parent == node]
            below = [drawn(child) for child in sorted(children, key=lambda child: (child not in path, child))]
            if node == path[-1]:
                below.insert(0, {"kind": "bonus", "about": "the target's own token", "label": bonus})
            kind, about = ("draft", "accepted") if node in path else ("left", "not taken")
            if node == 0:
                kind, about = "root", "already written"
            chance = f" {exp(scores[node]):.0%}" if scores is not None and node > 0 else ""
            return {"kind": kind, "about": about, "label": self._label(tokens[node]) + chance, "below": below}

        return drawn(0)

    def _label(self, token: int) -> str:
        return repr(self.tokenizer.decode([token]))[1:-1]


def origins(tokens: int, committed: Iterable[int]) -> list[tuple[int, bool]]:
    """Return the round of each of a row's generated tokens (from 0; -1 for the prefill), and whether it was drafted.

    The prefill gives the first token; of those `committed` in a round all but the last (the bonus token) were drafted.
    """
    found = [(-1, False)]
    for number, count in enumerate(committed):
        found += [(number, True)] * (count - 1) + [(number, False)] * min(count, 1)
    return found[:tokens]


def token_texts(tokenizer: Any, before: list[int], tokens: list[int]) -> list[str]:
    """Return the text that each token adds to that `before` it; a character of several comes with the last of them."""
    reader = Detokenizer(tokenizer, (), True, before)
    found = [reader.add(token) for token in tokens]
    found[-1] += reader.end()
    return found


def _printable(value: Any) -> Any:
    """Show control characters of plain text, which HTML forbids, as such."""
    if type(value) is not str:
        return value
    return "".join(c if c in "\n\t" or c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in value)
