"""The card of a drafter: its front matter, and between two marker lines what is known, written again at each push."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from jinja2 import Template

from hf_dart.errors import INSTALLED_FROM
from hf_dart.hub.facts import HeadFacts
from hf_dart.hub.tables import OURS, UNREADABLE, Verdict, as_table

BEGIN = "<!-- hf-dart: begin. Written from the head's files at each push, up to the end mark; write around it. -->"
END = "<!-- hf-dart: end -->"
_TAGS = ("speculative-decoding", "draft-model", "custom_generate")
_STAY = ("library_name", "pipeline_tag")
_TEMPLATE = Path(__file__).with_name("card.md")


def front_matter(facts: HeadFacts) -> dict[str, Any]:
    """Return the card's metadata in the Hub's fields.

    The relation is said outright, since the Hub takes every model with a base model for a fine-tune of it; of the
    relations it knows, a head that works only with its target's weights is an adapter.
    """
    known: dict[str, Any] = {
        "license": facts.license,
        "language": list(facts.language),
        "library_name": "hf-dart",
        "pipeline_tag": "text-generation",
        "base_model": facts.base_model,
        "base_model_relation": facts.base_model and "adapter",
        "datasets": list(facts.datasets),
        "tags": list(dict.fromkeys(["hf-dart", facts.texts.tag, *_TAGS, *facts.tags])),
    }
    return {name: value for name, value in known.items() if value}


def render_card(facts: HeadFacts, existing: str | None = None) -> str:
    """Write the card, as text.

    What stands outside the markers of an `existing` card is kept. In its front matter, fields that are known are
    written, tags are added, and all others are kept; a library and a pipeline that stand there stay. Without markers
    it was not written here, and is returned as it is.
    """
    try:
        written = f"{BEGIN}\n\n{_body(facts)}\n\n{END}"
    except UNREADABLE as error:
        raise ValueError(f"The bench or the training record is damaged ({error!r}); make them again.") from error
    if existing is None:
        called = facts.texts.called
        title = (facts.repository or called[0].upper() + called[1:]).rpartition("/")[2]
        card = ModelCard(f"---\n{{}}\n---\n\n# {title}\n\n{written}\n")
    elif not has_markers(existing):
        return existing
    else:
        try:
            card = ModelCard(existing, ignore_metadata_errors=True)
        except Exception as error:  # yaml raises many kinds of errors
            raise ValueError(f"The front matter of the card is not valid YAML ({error}); fix it.") from error
        above, _, rest = card.text.partition(BEGIN)
        card.text = above + written + rest.partition(END)[2]
    for name, value in front_matter(facts).items():
        if name == "tags":
            card.data[name] = list(dict.fromkeys([*(card.data.get(name) or []), *value]))
        elif name not in _STAY or card.data.get(name) is None:
            card.data[name] = value
    return str(card)


def has_markers(card: str) -> bool:
    """Return True if a card has a part that is written again."""
    return END in card.partition(BEGIN)[2]


def _body(facts: HeadFacts) -> str:
    """Fill in the template, which leaves out what is not known."""
    record, bench = facts.training or {}, facts.bench
    recipe = yaml.safe_dump(record["recipe"], sort_keys=False, allow_unicode=True) if record.get("recipe") else ""
    template = Template(_TEMPLATE.read_text(encoding="utf8"), trim_blocks=True)
    return template.render(
        facts=facts,
        drafter=facts.kind.drafter.__name__,
        installed_from=INSTALLED_FROM,
        about=_about(facts),
        bench_table=bench and as_table(bench),
        same=bench and _same(bench),
        training=_training(record),
        recipe=recipe.strip(),
    ).strip()


def _about(facts: HeadFacts) -> dict[str, str]:
    """Return the rows of the first table; empty ones are left out."""
    config = facts.config
    thinking = {None: "", True: ", thinking on", False: ", thinking off"}[config.enable_thinking]
    lends = "embedding width" in config.needs
    lent = "embeddings are the target's" if lends else "its tokens' table included"
    if lends and "LM head width" in config.needs:
        lent = "embeddings and LM head are the target's"
    layers = f"layers {', '.join(map(str, config.feature_layers))} of the target's {config.target_num_layers}"
    return {
        "widths": f"hidden {config.hidden_size}, {config.num_attention_heads} query and {config.num_key_value_heads} "
        f"key-value heads of {config.head_dim}, MLP {config.intermediate_size}",
        "reads": layers if config.feature_layers else "",
        "drafts": f"{config.draft_length} tokens",
        "options": _said(config.options),
        "parameters": f"{facts.parameters / 1e6:.1f} M in {facts.dtype}, {facts.size / 1e6:.1f} MB; {lent}",
        "tokenizer": f"the target's, vocabulary `{config.tokenizer_hash}`" if config.tokenizer_hash else "",
        "chat template": f"`{config.chat_template_hash}`{thinking}" if config.chat_template_hash else "",
        "published as": f"`{config.origin}`, in another format" if config.origin else "",
        "tree": _said(config.tree),
    }


def _training(record: dict[str, Any]) -> dict[str, str]:
    """Return a row for each field of a training record that is set, but the recipe."""
    rows = {}
    for name, value in record.items():
        if value and name != "recipe":
            told = {field: one for field, one in value.items() if one} if isinstance(value, dict) else value
            rows[name.replace("_", " ")] = _said(told)
    return rows


def _said(value: Any) -> str:
    """Return a value, or named ones, in words."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_said(one)}" for name, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _same(bench: dict[str, Any]) -> str:
    """Return a sentence on how many rows of a bench were stock's."""
    ours = [one for one in bench["results"] if one["method"] == OURS and "tau" in one]
    verdict = sum((Verdict(**one["compared"]) for one in ours), Verdict())
    same = verdict.rows - verdict.near_ties - verdict.differences
    apart = [
        f"; {verdict.near_ties} parted at a near-tie" * bool(verdict.near_ties),
        f"; {verdict.differences} differed" * bool(verdict.differences),
        "; the generator was not always where stock leaves it" * (not verdict.generator),
    ]
    return f"In the runs above, in {bench['dtype']}, {same} of {verdict.rows} rows were the same{''.join(apart)}."
