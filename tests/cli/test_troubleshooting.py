"""docs/troubleshooting.md has every error text of the library, and its common ones are those that users meet."""

from __future__ import annotations

import re

import pytest
from messages import PAGE, ROOMS, ROOT, by_room, messages, with_list
from support.tiny import prompts, tiny_head, tiny_target

from hf_dart import detach

TEXT = PAGE.read_text(encoding="utf8")
COMMON = re.findall(r"^\*\*(.*)\*\*$", TEXT.partition("<!-- messages -->")[0], re.MULTILINE)
SYMPTOMS = {"Slower than without drafts, and no error", "The text differs from stock's, in 16 bits"}


def test_every_error_is_on_the_page() -> None:
    assert with_list(TEXT) == TEXT, "run python docs/site/messages.py, which writes the list again"
    listed = {room for rooms in ROOMS.values() for room in rooms}
    for file in (ROOT / "hf_dart").rglob("*.py"):
        room = file.relative_to(ROOT / "hf_dart").parts[0]
        assert room in listed or not [*messages(file.read_text(encoding="utf8"))], room


def test_a_new_error_is_found() -> None:
    code = "if x:\n    raise ValueError(f'x is {x}, which is odd; ' 'give another.')\n"
    assert list(messages(code)) == ["x is …, which is odd; give another."]
    assert list(messages(code.replace("ValueError", "AttributeError"))) == []


def test_the_error_of_a_model_that_is_not_attached() -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    with pytest.raises(ValueError, match="assistant") as error:
        detach(target).generate(**prompts([7]), assistant=head, max_new_tokens=4)
    assert COMMON[0] in str(error.value)


@pytest.mark.parametrize("said", COMMON[1:])
def test_common_errors_are_errors(said: str) -> None:
    """What is not filled in of them is in one text of the list, in the same order."""
    parts = [part.strip("() ") for part in re.split(r"\.\.\.", said)]
    wanted = ".*".join(re.escape(part) for part in parts if part)
    texts = [text for room in by_room().values() for text in room]
    assert said in SYMPTOMS or any(re.search(wanted, text) for text in texts), wanted
