"""Gains and costs of a `Learner`: tau on texts that it never learns from, while others are served.

    python learning.py shifted    # the target is fine-tuned on C++ headers, which the head has not seen
    python learning.py other      # headers, with the target as it is
    python learning.py same       # Python, for which the head was trained: there is nothing to learn
    python learning.py untrained  # Python, with a head of random weights

Figures are of the small packaged pair, on the threads that torch has. Texts are sampled at T = 1 and T = 0.7 in turn,
`--rows` at a time, and drafted in trees of one size. Each call is made a second time without the learner, for the
acceptance length of the head as it was on the same text, so that `same` says what a learner loses. For 50,000 tokens:

    python learning.py same --tokens 50000
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from hf_dart import DartHead, Learner, TreeConfig, attach
from hf_dart.bench.pair import load_pair
from hf_dart.cli.demo_learning import TREE, fine_tune, header_tokens
from hf_dart.decoding.stats import DraftStats
from hf_dart.hub.machine import circumstances

TEMPERATURES = (1.0, 0.7)
PROMPT, HELD = 64, 16  # tokens of a prompt; texts that tau is measured on
OF_THE_CARDS = ("peft", "httpx", "_pytest")  # files that other figures of the packaged pair are of


def python_tokens(tokenizer: Any, length: int = 128) -> list[list[int]]:
    """Pieces of Python files, as `header_tokens` cuts headers."""
    root = Path(sysconfig.get_path("purelib"))
    files = sorted(file for file in root.rglob("*.py") if not set(file.parts) & {*OF_THE_CARDS})
    random.Random(0).shuffle(files)
    texts = (file.read_text(encoding="utf8", errors="replace")[:8000] for file in files[:1500])
    tokens = (tokenizer(text, verbose=False)["input_ids"] for text in texts)
    return [ids[length : 2 * length] for ids in tokens if len(ids) >= 2 * length]


def drafted(model: Any, head: Any, prompts: list[list[int]], number: int, new: int) -> DraftStats:
    ids = torch.tensor(prompts)
    torch.manual_seed(number)
    options = {"do_sample": True, "temperature": TEMPERATURES[number % 2], "top_k": 0, "max_new_tokens": new}
    tree = TreeConfig(**TREE)
    model.generate(ids, attention_mask=torch.ones_like(ids), **options, assistant=head, tree_config=tree)
    return head.last_stats


def held_out(model: Any, head: Any, prompts: list[list[int]]) -> list[float]:
    """tau at each temperature."""
    return [round(drafted(model, head, prompts, number, 96).tau, 3) for number in range(2)]


def measured(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    pair = load_pair()
    model, head = pair.model, pair.head
    rows = (python_tokens if kind in ("same", "untrained") else header_tokens)(pair.tokenizer)
    random.Random(1).shuffle(rows)
    prompts = [row[:PROMPT] for row in rows]
    held, prompts = prompts[:HELD], prompts[HELD:]
    found: dict[str, Any] = {"kind": kind, "share": arguments.share, "rows": arguments.rows}
    if kind == "untrained":
        head = DartHead.from_target(model, tokenizer=pair.tokenizer, feature_layers=head.feature_layers, num_layers=1)
    found["tau of the pair"] = held_out(model, pair.head, held)
    if kind == "shifted":
        count = len(prompts) // 2
        found["loss of the target"] = fine_tune(model, rows[HELD + count :], arguments.tuning)
        prompts = prompts[:count]
    frozen = copy.deepcopy(head)
    learner = Learner(share=arguments.share)
    attach(model, head, learner=learner)
    learner.pause()
    marks = [arguments.tokens * part // 8 for part in (0, 1, 2, 4, 6, 8)]
    curve: list[dict[str, Any]] = []
    served = {"learner": DraftStats(), "frozen": DraftStats()}
    started, number = time.time(), 0
    while marks:
        if served["learner"].tokens >= marks[0]:
            marks.pop(0)
            learner.pause()
            stats = learner.stats
            curve.append({"tokens": served["learner"].tokens, "tau": held_out(model, head, held), "steps": stats.steps})
            curve[-1] |= {"seconds": round(stats.seconds, 1), "share": round(stats.share, 3), "learnt": stats.learnt}
            print(json.dumps(curve[-1]), f"{time.time() - started:.0f} s; {stats}", flush=True)
            learner.resume()
        some = [prompts[(number * arguments.rows + row) % len(prompts)] for row in range(arguments.rows)]
        served["learner"].merge(drafted(model, head, some, number, 128))
        if not arguments.alone:
            served["frozen"].merge(drafted(model, frozen, some, number, 128))
        number += 1
    taus = {name: round(stats.tau, 3) for name, stats in served.items() if stats.tokens}
    found |= {"curve": curve, "served tau": taus}
    if kind == "shifted":
        before, after = sum(found["tau of the pair"]), sum(curve[0]["tau"])
        found["regained"] = [round((sum(one["tau"]) - after) / (before - after), 2) for one in curve]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("shifted", "other", "same", "untrained"))
    parser.add_argument("--tokens", type=int, default=20000, help="to be served (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1, help="texts at a time (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.1, help="of the learner (default: %(default)s)")
    parser.add_argument("--tuning", type=float, default=60, help="seconds of fine-tuning (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="do not repeat each call without the learner")
    parser.add_argument("--json", type=Path, help="file of figures by kind, in which this kind is replaced")
    arguments = parser.parse_args()
    found = measured(arguments.kind, arguments)
    found |= circumstances(["python", *sys.argv], torch.device("cpu"))
    print(json.dumps(found, indent=1))
    if arguments.json is not None:
        kept = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        kept |= {"date": found["date"], found["kind"]: found}
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
