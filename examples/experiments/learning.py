"""Gains and costs of a `Learner`: tau on texts that it never learns from, while others are served.

    python learning.py shifted    # the target is fine-tuned on C++ headers, which the head has not seen
    python learning.py other      # headers, or --text FILES, with the target as it is
    python learning.py same       # Python, for which the head was trained: there is nothing to learn
    python learning.py untrained  # Python, with a head of random weights
    python learning.py anchors    # headers: the same steps on the same texts, from drafts that begin here or there

Figures are of the small packaged pair unless `--target` and `--head` name another, on the threads that torch has.
Texts are sampled at T = 1 and T = 0.7 in turn, `--rows` at a time, and drafted in trees of one size. Each call is made
a second time without the learner, for the acceptance length of the head as it was on the same text, so that `same` says
what a learner loses. For 50,000 tokens, and for a larger pair:

    python learning.py same --tokens 50000
    python learning.py shifted --target google/gemma-3-270m --head examples/gemma3_270m/head --nodes 8 --held 8 --alone
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
from hf_dart.cli.demo_learning import PIECE, TREE, fine_tune, header_tokens
from hf_dart.decoding.stats import DraftStats
from hf_dart.hub.machine import circumstances
from hf_dart.learning import student

TEMPERATURES = (1.0, 0.7)
PROMPT = 64  # tokens
OF_THE_CARDS = ("peft", "httpx", "_pytest")  # files that other figures of the packaged pair are of


def python_tokens(tokenizer: Any) -> list[list[int]]:
    """Pieces of Python files, as `header_tokens` cuts headers."""
    root = Path(sysconfig.get_path("purelib"))
    files = sorted(file for file in root.rglob("*.py") if not set(file.parts) & {*OF_THE_CARDS})
    random.Random(0).shuffle(files)
    texts = (file.read_text(encoding="utf8", errors="replace")[:8000] for file in files[:1500])
    tokens = (tokenizer(text, verbose=False)["input_ids"] for text in texts)
    return [ids[PIECE : 2 * PIECE] for ids in tokens if len(ids) >= 2 * PIECE]


def file_tokens(tokenizer: Any, files: list[Path]) -> list[list[int]]:
    """Pieces of files, cut one after another."""
    texts = (file.read_text(encoding="utf8", errors="replace")[: 400 * 4 * PIECE] for file in sorted(files))
    tokens = [tokenizer(text, verbose=False)["input_ids"] for text in texts]
    return [ids[start : start + PIECE] for ids in tokens for start in range(0, len(ids) - PIECE, PIECE)]


def drafted(model: Any, head: Any, prompts: list[list[int]], number: int, new: int, nodes: int) -> DraftStats:
    ids = torch.tensor(prompts)
    torch.manual_seed(number)
    options = {"do_sample": True, "temperature": TEMPERATURES[number % 2], "top_k": 0, "max_new_tokens": new}
    tree = TreeConfig(**{**TREE, "nodes": nodes})
    model.generate(ids, attention_mask=torch.ones_like(ids), **options, assistant=head, tree_config=tree)
    return head.last_stats


def held_out(model: Any, head: Any, prompts: list[list[int]], nodes: int) -> list[float]:
    """tau at each temperature."""
    return [round(drafted(model, head, prompts, number, 96, nodes).tau, 3) for number in range(2)]


def measured(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    pair = load_pair(arguments.target, arguments.head, "float32")
    model, head = pair.model, pair.head
    begin = pair.tokenizer("")["input_ids"]  # <bos>, or nothing
    if arguments.text:
        pieces = file_tokens(pair.tokenizer, arguments.text)
    else:
        pieces = (python_tokens if kind in ("same", "untrained") else header_tokens)(pair.tokenizer)
    rows = [begin + piece for piece in pieces]
    random.Random(1).shuffle(rows)
    prompts = [row[:PROMPT] for row in rows]
    held, prompts = prompts[: arguments.held], prompts[arguments.held :]
    nodes = arguments.nodes
    found: dict[str, Any] = {"kind": kind, "share": arguments.share, "rows": arguments.rows, "nodes": nodes}
    if kind == "untrained":
        same = {"feature_layers": head.feature_layers, "draft_vocabulary": head.draft_vocabulary, "num_layers": 1}
        head = DartHead.from_target(model, tokenizer=pair.tokenizer, **same)
    found["tau of the pair"] = held_out(model, pair.head, held, nodes)
    if kind == "shifted":
        count = len(prompts) // 2
        found["loss of the target"] = fine_tune(model, rows[arguments.held + count :], arguments.tuning)
        prompts = prompts[:count]
    if kind == "anchors":
        return found | anchors(model, head, prompts, held, arguments)
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
            curve.append(
                {"tokens": served["learner"].tokens, "tau": held_out(model, head, held, nodes), "steps": stats.steps}
            )
            curve[-1] |= {"seconds": round(stats.seconds, 1), "share": round(stats.share, 3), "learnt": stats.learnt}
            print(json.dumps(curve[-1]), f"{time.time() - started:.0f} s; {stats}", flush=True)
            learner.resume()
        some = [prompts[(number * arguments.rows + row) % len(prompts)] for row in range(arguments.rows)]
        served["learner"].merge(drafted(model, head, some, number, 128, nodes))
        if not arguments.alone:
            served["frozen"].merge(drafted(model, frozen, some, number, 128, nodes))
        number += 1
    taus = {name: round(stats.tau, 3) for name, stats in served.items() if stats.tokens}
    found |= {"curve": curve, "served tau": taus}
    if kind == "shifted":
        before, after = sum(found["tau of the pair"]), sum(curve[0]["tau"])
        found["regained"] = [round((sum(one["tau"]) - after) / (before - after), 2) for one in curve]
    return found


def anchors(
    model: Any, head: Any, prompts: list[list[int]], held: list[list[int]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """tau on texts that were not learnt from, by the share of the texts in a step whose drafts begin anywhere."""
    learner = Learner(share=0)
    attach(model, head, learner=learner)
    served = DraftStats()
    for number in range(10**6):
        some = [prompts[(number * arguments.rows + row) % len(prompts)] for row in range(arguments.rows)]
        served.merge(drafted(model, head, some, number, 128, arguments.nodes))
        if served.tokens >= arguments.tokens:
            break
    learner.pause()
    learner._ring.take_fresh()
    found: dict[str, Any] = {"tokens": served.tokens, "steps": arguments.steps, "after": {}}
    before = found["before"] = held_out(model, head, held, arguments.nodes)
    for share in (1.0, 0.5, 0.0):
        student._ANYWHERE = share
        learns = student.Student(head)
        for _ in range(arguments.steps):
            learns.step(learner._ring.draw(student.SEGMENTS, learns.generator), arguments.rate)
        learns.use(True)
        found["after"][share] = held_out(model, head, held, arguments.nodes)
        learns.use(False)
        print(share, before, found["after"][share], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("shifted", "other", "same", "untrained", "anchors"))
    parser.add_argument("--target", help="folder or Hub id (default: that of --head)")
    parser.add_argument("--head", help="folder or Hub id (default: the packaged pair's)")
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="in place of headers or Python")
    parser.add_argument("--tokens", type=int, default=20000, help="to be served (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1, help="texts at a time (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=TREE["nodes"], help="of each tree (default: %(default)s)")
    parser.add_argument("--held", type=int, default=16, help="texts that tau is measured on (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.1, help="of the learner (default: %(default)s)")
    parser.add_argument("--tuning", type=float, default=60, help="seconds of fine-tuning (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="of anchors (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-2, help="learning rate of anchors (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="do not repeat each call without the learner")
    parser.add_argument("--json", type=Path, help="file of figures by kind, in which this kind is replaced")
    arguments = parser.parse_args()
    found = measured(arguments.kind, arguments)
    about = circumstances(["python", *sys.argv], torch.device("cpu"))
    found |= about
    print(json.dumps(found, indent=1))
    if arguments.json is not None:
        kept = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        kept |= {**about, found["kind"]: found}
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
