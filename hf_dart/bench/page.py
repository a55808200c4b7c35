"""`View`: one call of `generate` as a page of HTML that loads nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import dropwhile
from math import exp
from pathlib import Path
from typing import Any

from hf_dart.decoding.summary import summary

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 sans-serif; margin: 1.5em auto; max-width: 60em; padding: 0 1em }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #8886; padding: .8em; tab-size: 4 }
td { padding-right: 1.5em }
caption { font-weight: bold; padding-top: .8em }
a { color: inherit; text-decoration: none }
.prompt { opacity: .7 }
.root { background: #8888 }
.left { background: #8883 }
.draft { background: #009e7360 }
.bonus { background: #0072b260 }
.wide { overflow-x: auto; scroll-margin-top: 3em }
.wide:target { outline: 2px solid #888 }
.node { display: flex; align-items: flex-start; font-size: 80% }
.node .node { font-size: 100% }
.node > span { flex: none; width: 9em; margin: 0 1em .4em 0; padding: 0 .3em; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis }
.node > div { border-left: 1px solid #8886; padding-left: 1em }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


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
            raise ValueError(
                "There is no trace to show; call generate(..., assistant=drafter, trace=True, "
                "return_dict_in_generate=True) and give what it returns."
            )
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
        page = escape(self.html().replace("<head>", '<head>\n<base href="about:srcdoc">', 1), quote=True)
        return f'<iframe srcdoc="{page}" sandbox="" style="width: 100%; height: 42em; border: 1px solid #ddd"></iframe>'

    def html(self) -> str:
        """Return the page as HTML, with nothing to load and no script."""
        notes = "".join(f"<p>{_clean(note)}</p>" for note in self.notes)
        return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>hf_dart: {len(self.tokens)} tokens, τ {self.stats.tau:.2f}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{len(self.tokens)} tokens in {len(self.rounds)} rounds, τ {self.stats.tau:.2f}</h1>
{notes}
<p><span class="draft">accepted draft tokens</span> <span class="bonus">the target's own tokens</span>
<span class="prompt">prompt</span></p>
<pre id="text">{self._text()}</pre>
<h2>Statistics</h2>
<div class="wide" id="statistics">{summary(self.stats)}</div>
<h2>Trees</h2>
<p>Each round's tree after the last token written. Green: accepted. Blue: what the target wrote itself after them.
Per cent: the drafter's own estimate of the path.</p>
{self._trees()}
</body>
</html>
"""

    def _text(self) -> str:
        prompt = _clean(self.tokenizer.decode(self.prompt))
        found = [f'<span class="prompt">{prompt}</span>'] if self.prompt else []
        pieces = token_texts(self.tokenizer, self.prompt[-8:], self.tokens)
        owners = origins(len(self.tokens), [len(one.paths[self.row]) for one in self.rounds])
        for (number, drafted), piece in zip(owners, pieces, strict=True):
            kind = "draft" if drafted else "bonus"
            if number < 0:
                found.append(f'<span class="{kind}" title="of the prefill">{_clean(piece)}</span>')
                continue
            about = f"round {number + 1}, {'drafted' if drafted else 'the target&#x27;s own'}"
            found.append(f'<a class="{kind}" href="#round-{number + 1}" title="{about}">{_clean(piece)}</a>')
        return "".join(found)

    def _trees(self) -> str:
        found: list[str] = []
        written = 1
        for number, one in enumerate(self.rounds):
            count = len(one.paths[self.row])
            if not count:
                continue
            written += count
            last = self._label(self.tokens[written - 1])
            drafted = sum(parent >= 0 for parent in one.parents[self.row])
            title = f"Round {number + 1}: {count - 1} accepted of {drafted} drafted, then {last}"
            spent = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in one.seconds.items())
            found.append(
                # The id lies inside: browsers open what hides the place that a link leads to.
                f'<details{" open" if not found else ""}><summary title="{escape(spent)}">{title}</summary>'
                f'<div class="wide" id="round-{number + 1}">{self._tree(one, last)}</div></details>'
            )
        return "\n".join(found)

    def _tree(self, one: Any, bonus: str) -> str:
        """Draw the tree of a round from left to right: the accepted path straight, what was not taken below it."""
        tokens, parents, path = one.tokens[self.row], one.parents[self.row], one.paths[self.row]
        scores = None if one.scores is None else one.scores[self.row]

        def drawn(node: int) -> str:
            children = [child for child, parent in enumerate(parents) if parent == node]
            below = [drawn(child) for child in sorted(children, key=lambda child: (child not in path, child))]
            if node == path[-1]:
                below.insert(0, _box("bonus", "the target's own token", bonus))
            kind, about = ("draft", "accepted") if node in path else ("left", "not taken")
            if node == 0:
                kind, about = "root", "already written"
            chance = f" {exp(scores[node]):.0%}" if scores is not None and node > 0 else ""
            return _box(kind, about, self._label(tokens[node]) + chance, below)

        return drawn(0)

    def _label(self, token: int) -> str:
        return _clean(repr(self.tokenizer.decode([token]))[1:-1])


def _box(kind: str, about: str, label: str, below: Iterable[str] = ()) -> str:
    """Return a node with its children, as HTML; `label` is HTML already."""
    inside = "".join(below)
    after = f"<div>{inside}</div>" if inside else ""
    return f'<div class="node"><span class="{kind}" title="{label}: {escape(about)}">{label}</span>{after}</div>'


def origins(tokens: int, committed: Iterable[int]) -> list[tuple[int, bool]]:
    """Return the round of each of a row's generated tokens (from 0; -1 for the prefill), and whether it was drafted.

    The prefill gives the first token; all tokens of a round but the last (the bonus token) were drafted.

    Args:
        tokens: how many the row has.
        committed: tokens per round.
    """
    found = [(-1, False)]
    for number, count in enumerate(committed):
        found += [(number, True)] * (count - 1) + [(number, False)] * min(count, 1)
    return found[:tokens]


def token_texts(tokenizer: Any, before: list[int], tokens: list[int]) -> list[str]:
    """Return the text that each token adds; a character of several tokens comes with the last of them.

    Args:
        before: the last ids in front of `tokens`.
    """
    found = []
    shown = tokenizer.decode(before) if before else ""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode([*before, *tokens[:count]])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and count < len(tokens):
            found.append("")
            continue
        # Some tokenizers change what stood in front, such as a space.
        found.append(text[len(shown) :] if text.startswith(shown) else tokenizer.decode(tokens[count - 1 : count]))
        shown = text
    return found


def _clean(text: str) -> str:
    """Text for HTML; control characters, which it forbids, are shown as such."""
    shown = "".join(c if c in "\n\t" or c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return escape(shown)
