"""The card of a drafter, written from what is known about it; nothing in it is typed by hand.

A card has three parts: the front matter, a part between two marker lines that is written again at each push, and
whatever people write above and below the markers, which stays as it is.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResultEntry, ModelCard

from hf_dart.errors import INSTALLED_FROM
from hf_dart.hub.facts import HeadFacts
from hf_dart.hub.tables import OURS, UNREADABLE, Verdict, as_table, labels

BEGIN = "<!-- hf-dart: begin. Written from the head's files at each push, up to the end mark; write around it. -->"
END = "<!-- hf-dart: end -->"
_TAGS = ("speculative-decoding", "draft-model", "custom_generate")
_STAY = ("library_name", "pipeline_tag")
_HOME = "https://huggingface.co/"
_TEMPLATE, _SECTION = Path(__file__).with_name("card.md"), "<!-- section -->"


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

    Args:
        facts: about the drafter.
        existing: the card as it is now. What stands outside its markers is kept. In its front matter, fields that
            are known are written, tags are added, and all others are kept; a library and a pipeline that stand
            there stay. Without markers it was not written here, and is returned as it is.

    Raises:
        ValueError: the front matter of `existing` is not YAML; or the bench or the training record, whose files were
            checked for their fields only, holds something else in one.
    """
    try:
        written = f"{BEGIN}\n\n{_body(facts)}\n\n{END}"
    except UNREADABLE as error:
        raise ValueError(
            f"The bench or the training record is not what hf-dart bench and the trainer write ({error!r}); make them "
            "again."
        ) from error
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


def eval_results(facts: HeadFacts) -> list[EvalResultEntry]:
    """τ and speed over stock, for the Hub's `.eval_results/*.yaml`; none without a data set of the Hub.

    The tasks are called tau and speedup, then by mode and batch: tau-greedy-batch-1.
    """
    if facts.bench is None or facts.bench_dataset is None:
        return []
    notes = f"{facts.bench['dtype']}, {facts.bench['hardware']}, {facts.bench['command']}"
    source = {"source_url": f"{_HOME}{facts.repository}", "source_name": "Model card"} if facts.repository else {}
    entries = []
    for one, case in _ours(facts.bench):
        name = f"{one['mode']} {case}"
        task = f"{''.join(c if c.isalnum() else ' ' for c in name)} batch {one['batch']}"
        task = "-".join(task.lower().split())
        values = {"tau": one["tau"], "speedup": one["ratio"]["median"]}
        entries += [
            EvalResultEntry(facts.bench_dataset, f"{metric}-{task}", round(value, 4), notes=notes, **source)
            for metric, value in values.items()
        ]
    return entries


def _body(facts: HeadFacts) -> str:
    """Fill in the template's sections; those with a field that is not known are left out."""
    fields, sections = _fields(facts), []
    for section in _TEMPLATE.read_text(encoding="utf8").split(_SECTION):
        with suppress(KeyError):
            sections.append(section.strip().format_map(fields))
    return "\n\n".join(sections)


def _fields(facts: HeadFacts) -> dict[str, Any]:
    """Values for the template, by name; those that are not known are left out."""
    config, texts = facts.config, facts.texts
    named = f"[{facts.base_model}]({_HOME}{facts.base_model})" if facts.base_model else f"`{facts.target}`"
    revision = f" at revision `{config.target_revision}`" if config.target_revision else ""
    fields = {
        "introduced": texts.introduced,
        "made_for": f" for {named}{revision}" if facts.target else "",
        "short": texts.short,
        "rows": _rows(_about(facts)),
        "bench_same": "",
        "target": facts.target or "its target",
        "other": "widths, layers or vocabulary" if config.needs else "vocabulary",
    }
    if texts.paper is not None:
        number, title = texts.paper
        fields |= {"tag": texts.tag, "number": number, "title": title, "year": f"20{number[:2]}"}
    if facts.repository is not None and facts.base_model is not None:
        class_name = facts.kind.drafter.__name__
        fields |= {"installed_from": INSTALLED_FROM, "module": facts.kind.module, "class_name": class_name}
        fields |= {"base_model": facts.base_model, "repository": facts.repository}
    if facts.bench is not None:
        fields |= {"bench_command": facts.bench["command"], "bench_table": as_table(facts.bench)}
        fields |= {"bench_same": _same(facts.bench)}
    if facts.training is not None:
        recipe = facts.training.get("recipe", {})
        shown = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).strip()
        shown = f"\n\nBy `hf-dart train` with these options:\n\n```yaml\n{shown}\n```" if recipe else ""
        fields |= {"training_rows": _rows(_training(facts.training)), "recipe": shown}
    return fields


def _rows(cells: dict[str, str]) -> str:
    """Return the lines of a table of two columns; empty ones are left out."""
    return "\n".join(f"| {name} | {value} |" for name, value in cells.items() if value)


def _about(facts: HeadFacts) -> dict[str, str]:
    config = facts.config
    thinking = {None: "", True: ", thinking on", False: ", thinking off"}[config.enable_thinking]
    lends = "embedding width" in config.needs
    lent = "embeddings and LM head are the target's" if lends else "its tokens' table included"
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
    told = {name.replace("_", " "): value for name, value in record.items() if value and name != "recipe"}
    fields = {name: value for name, value in told.items() if isinstance(value, dict)}
    told |= {name: {field: one for field, one in value.items() if one} for name, value in fields.items()}
    return {name: _said(value) for name, value in told.items()}


def _said(value: Any) -> str:
    """Return a value, or named ones, in words."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_said(one)}" for name, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _same(bench: dict[str, Any]) -> str:
    """Return a sentence on how many rows of a bench were stock's."""
    verdict = sum((Verdict(**one["compared"]) for one, _ in _ours(bench)), Verdict())
    same = verdict.rows - verdict.near_ties - verdict.differences
    apart = [
        f"{verdict.near_ties} parted at a near-tie" * bool(verdict.near_ties),
        f"{verdict.differences} differed" * bool(verdict.differences),
        "the generator was not always where stock leaves it" * (not verdict.generator),
    ]
    found = "; ".join(["", *filter(None, apart)])
    return f" In the runs above, in {bench['dtype']}, {same} of {verdict.rows} rows were the same{found}."


def _ours(bench: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Results of the head as it comes, and their cases."""
    entries = zip(bench["results"], labels(bench), strict=True)
    return [(one, case) for one, case in entries if one["method"] == OURS and "tau" in one]
