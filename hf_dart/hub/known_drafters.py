"""Published drafters of known targets, by the table `published.json` of this package."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def published_table() -> dict[str, Any]:
    """Return the table: its `date`, and known `targets`, each with its `drafters`, best first.

    What was published of a drafter comes first: those with an `acceptance` (tokens per forward of the target) by that,
    others after them. Figures of several sources were measured under several settings, none of them with hf_dart.
    """
    return json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


def last_name(path: str) -> str:
    """Return the last part of a Hub id or a path, by which a target is known, in lower case."""
    return path.rstrip("/").lower().rpartition("/")[2]


def published_drafters(config: Any) -> tuple[str, list[dict[str, Any]]]:
    """Return the known target that a config is of, and its drafters, best first; "" and none for other targets.

    A target is known by the name that it was loaded by, or else by its architecture and sizes: then it may be a
    fine-tune of the one that the drafters were trained for, for which fewer of their tokens are accepted.
    """
    name, text = last_name(str(config.name_or_path)), config.get_text_config(decoder=True)
    targets = published_table()["targets"]
    fits = [one for one in targets if all(getattr(text, k, None) == v for k, v in one.get("sizes", {}).items())]
    named = [known for known in fits if last_name(known["name"]) == name]
    found = named or [known for known in fits if "sizes" in known] or [{"name": "", "drafters": []}]
    return found[0]["name"], found[0]["drafters"]
