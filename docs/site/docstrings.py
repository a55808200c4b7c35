"""Docstrings as the API pages show them: [`Name`] in their text becomes a link, where the pages have that name."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Links(griffe.Extension):
    """Links names in square brackets to their entries."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrite the docstrings of a whole package, once all its names are known."""
        paths: dict[str, list[str]] = {}
        objects = list(_objects(pkg))
        for one in objects:
            paths.setdefault(one.name, []).append(one.path)
        for one in objects:
            if one.docstring is not None:
                one.docstring.value = _linked(one.docstring.value, paths)


def _objects(module: Any) -> Any:
    for member in module.members.values():
        if not member.is_alias:
            yield member
            if member.is_module or member.is_class:
                yield from _objects(member)


def _linked(text: str, paths: dict[str, list[str]]) -> str:
    def link(found: re.Match[str]) -> str:
        places = [path for path in paths.get(found[1].rpartition(".")[2], ()) if path.endswith(found[1])]
        if len(places) != 1:
            return f"`{found[1]}`"
        return f'<autoref identifier="{places[0]}" optional><code>{found[1]}</code></autoref>'

    return re.sub(r"\[`([\w.]+)`\](?![\[(])", link, text)
