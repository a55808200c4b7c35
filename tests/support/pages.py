"""Reading a page strictly: what is open is closed, nothing is loaded, nothing runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"base", "meta", "br", "img", "hr", "input", "link"}
_ALLOWED = {
    "html", "head", "base", "meta", "title", "style", "body", "h1", "h2", "p", "span", "pre", "a", "table", "caption",
    "tr", "td", "div", "details", "summary", "iframe",
}  # fmt: skip


@dataclass
class Element:
    """One element: its attributes, its parts in order."""

    tag: str
    attributes: dict[str, str]
    parts: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text inside, titles of pictures and styles left out."""
        texts = [part if isinstance(part, str) else part.text for part in self.parts if part_is_shown(part)]
        return "".join(texts)

    def find(self, tag: str, **attributes: str) -> list[Element]:
        """All elements inside with that tag and those attributes; `class_` for class."""
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        found = []
        for part in self.parts:
            if isinstance(part, Element):
                if part.tag == tag and wanted.items() <= part.attributes.items():
                    found.append(part)
                found += part.find(tag, **attributes)
        return found


def part_is_shown(part: Element | str) -> bool:
    return isinstance(part, str) or part.tag not in ("title", "style")


class Strict(HTMLParser):
    """Raises an `AssertionError` at what a page must not hold."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _ALLOWED, tag
        attributes = {name: value or "" for name, value in attrs}
        if "srcdoc" in attributes:
            read(attributes.pop("srcdoc"))
        for name, value in attributes.items():
            assert not name.startswith("on"), name
            assert name not in ("src", "srcset", "xlink:href", "action", "data"), name
            assert name != "href" or value.startswith("#") or (tag, value) == ("base", "about:srcdoc"), value
            assert name == "xmlns" or "//" not in value or name == "title", (name, value)
        element = Element(tag, attributes)
        self._open[-1].parts.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> in <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        assert self._open[-1].tag != "style" or ("url(" not in data and "@import" not in data)
        self._open[-1].parts.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def read(page: str) -> Element:
    """The elements of a page."""
    parser = Strict()
    parser.feed(page)
    parser.close()
    assert len(parser._open) == 1, f"<{parser._open[-1].tag}> is never closed"
    return parser.root
