"""`View`: one call of `generate` as a page of HTML that loads nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import dropwhile
from pathlib import Path
from typing import Any

from hf_dart.view.records import Figures, Round, origins
from hf_dart.view.statistics import summary
from hf_dart.view.svg import dark
from hf_dart.view.trees import ACCEPTED, BONUS, tree_picture

_LABEL = 11  # characters of a token in its node
_STYLE = f"""
:root {{ color-scheme: light dark; --ink: #222; --paper: #fff; --soft: #666; --edge: #ddd; --draft: {ACCEPTED};
  --bonus: {BONUS} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #ddd; --paper: #1b1b1b; --soft: #999; --edge: #444; --draft: {dark(ACCEPTED)};
    --bonus: {dark(BONUS)} }}
}}
body {{ font: 15px/1.5 sans-serif; margin: 1.5em auto; max-width: 60em; padding: 0 1em; color: var(--ink);
  background: var(--paper) }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--edge); padding: .8em; tab-size: 4 }}
th {{ text-align: left; font-weight: normal; color: var(--soft); padding-right: 1.5em }}
a {{ color: inherit; text-decoration: none }}
.prompt {{ color: var(--soft) }}
.draft {{ background: var(--draft) }}
.bonus {{ background: var(--bonus) }}
details {{ margin: .3em 0 }}
summary {{ cursor: pointer }}
.wide {{ overflow-x: auto; scroll-margin-top: 3em }}
.wide:target {{ outline: 2px solid var(--soft) }}
svg {{ display: block; margin: .5em 0 }}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class View:
    """What `generate(..., assistant=drafter, trace=True, return_dict_in_generate=True)` did in one row.

    In a notebook it shows itself; `save` writes it to a file.

    Attributes:
        tokenizer: of the target.
        prompt: token ids.
        tokens: generated ids.
        stats: of the call, with its trace.
        row: which row of the batch this is.
        notes: sentences for the top of the page.
    """

    tokenizer: Any
    prompt: list[int]
    tokens: list[int]
    stats: Figures
    row: int = 0
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, output: Any, tokenizer: Any, row: int = 0, notes: tuple[str, ...] = ()) -> View:
        """The view of one row of what `generate(..., trace=True, return_dict_in_generate=True)` returned.

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
    def rounds(self) -> Sequence[Round]:
        """The rounds of the call, in order."""
        assert self.stats.trace is not None
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
        """The page as HTML, with nothing to load and no script."""
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
            last = self.tokens[written - 1]
            title = f"Round {number + 1}: {count - 1} accepted of {sum(p >= 0 for p in one.parents[self.row])} drafted"
            picture = tree_picture(one, self.row, self._label, title, last)
            found.append(
                # The id lies inside: browsers open what hides the place that a link leads to.
                f'<details{" open" if not found else ""}><summary>{title}, then {_clean(self._label(last))}</summary>'
                f'<div class="wide" id="round-{number + 1}">{picture}</div></details>'
            )
        return "\n".join(found)

    def _label(self, token: int) -> str:
        text = repr(self.tokenizer.decode([token]))[1:-1]
        return text if len(text) <= _LABEL else text[: _LABEL - 1] + "…"


def token_texts(tokenizer: Any, before: list[int], tokens: list[int]) -> list[str]:
    """What each token adds to the text; a character of several tokens comes with the last of them.

    Args:
        before: the last ids in front of `tokens`.
    """
    found = []
    ids = list(before)
    shown = tokenizer.decode(ids) if ids else ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            found.append("")
            continue
        # Some tokenizers change what stood in front, such as a space.
        found.append(text[len(shown) :] if text.startswith(shown) else tokenizer.decode([token]))
        ids, shown = ids[-8:], tokenizer.decode(ids[-8:])
    rest = tokenizer.decode(ids)
    if found and not found[-1] and rest.startswith(shown):
        found[-1] = rest[len(shown) :]
    return found


def _clean(text: str) -> str:
    """Text for HTML; control characters, which it forbids, are shown as such."""
    shown = "".join(c if c in "\n\t" or c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return escape(shown)
