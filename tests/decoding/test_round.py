"""One round of the packaged pair, traced: the files that it enters are those that CONTRIBUTING.md lists."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import hf_dart
from hf_dart import TreeConfig
from hf_dart.bench.pair import load_pair
from hf_dart.decoding import api
from hf_dart.decoding.session import Session

LIBRARY = Path(hf_dart.__file__).parent
LIST = Path(__file__).parents[2] / "CONTRIBUTING.md"
MOST = 20
"""Files that a round enters; it goes down when one is merged into another."""


def test_the_files_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled, on a CPU, in the middle of a call: the links of the numbered list in "Where to start reading"."""
    entered: list[set[str]] = []  # of each round, the files of the library whose functions it calls
    one_round = api.one_round

    def traced(session: Session) -> None:
        found: set[str] = set()
        entered.append(found)

        def called(frame: FrameType, event: str, argument: Any) -> None:
            path = Path(frame.f_code.co_filename)
            if event == "call" and path.is_relative_to(LIBRARY):
                found.add(path.relative_to(LIBRARY).as_posix())

        before = sys.getprofile()
        sys.setprofile(called)
        try:
            one_round(session)
        finally:
            sys.setprofile(before)

    monkeypatch.setattr(api, "one_round", traced)
    pair = load_pair()
    ids = pair.tokenizer("def read(path):\n", return_tensors="pt")["input_ids"]
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 24, "tree_config": TreeConfig(nodes=16)}
    torch.manual_seed(0)
    pair.model.generate(ids, attention_mask=torch.ones_like(ids), assistant=pair.head, **options)
    assert pair.head.last_stats.accepted > 0
    steady = entered[len(entered) // 2]
    part = LIST.read_text(encoding="utf8").split("### Where to start reading\n")[1].split("\n### ")[0]
    steps = re.search(r"^1\. .*?(?=\n\n)", part, re.DOTALL | re.MULTILINE)
    listed = re.findall(r"\]\(hf_dart/([\w/]+\.py)\)", steps[0])
    assert len(listed) == len(set(listed))
    print(f"A round enters {len(steady)} files of hf_dart.")  # for those who run it with -s
    assert set(listed) - steady == set(), "listed in CONTRIBUTING.md, and not entered"
    assert steady - set(listed) == set(), "entered, and not listed in CONTRIBUTING.md"
    assert len(steady) <= MOST
