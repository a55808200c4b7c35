"""Gains of a memory of earlier calls over copies of the running text: replayed streams, and a target's own answers.

    python examples/experiments/remembered.py --agents agents.json --tokenizer google/gemma-3-270m
    python examples/experiments/remembered.py --agents agents.json --target google/gemma-3-270m --prompts 12

The first replays given texts, call after call: files of Python's `email`, a synthetic loop of tool calls, and recorded
sessions of agents if there are any (`--agents`: JSON with `cases`, each with `messages` and a `reference_response`;
each answer of an assistant is a call). A step accepts what the tree holds of the text, then the text's next token.
Where arctic-inference is installed, its suffix trees are replayed beside (up to 24 tokens, factor 4, chance 0.05). The
second lets a target answer in these sessions, by copies alone, with a memory and without: the same texts, at what ratio
of processor time.
"""

from __future__ import annotations

import argparse
import email
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dart import LookupDrafter, SuffixStore, attach
from hf_dart.hub.loading import PACKAGED_TARGET
from hf_dart.trees.copies import RowCopies, TextIndex

DEPTH, NODES = 24, 24
Call = tuple[list[int], list[int]]
"""A prompt and the answer to it."""


def source_files(tokenizer: Any, count: int) -> Iterator[Call]:
    """The files of a package, one after the other, with nothing before them."""
    for path in sorted(Path(email.__file__).parent.glob("*.py"))[:count]:
        tokens = tokenizer(path.read_text(encoding="utf8"))["input_ids"][:2000]
        yield tokens[:1], tokens[1:]


def tool_calls(tokenizer: Any, count: int) -> Iterator[Call]:
    """Answers of three JSON calls each, whose arguments come from a few values."""
    draw = random.Random(0)
    paths = [f"src/{room}/{name}.py" for room in ("core", "api", "tests") for name in ("main", "io", "config", "cache")]
    for number in range(count):
        calls = [
            {
                "tool": draw.choice(["read_file", "grep", "edit", "run"]),
                "arguments": {"path": draw.choice(paths), "line": draw.randrange(400)},
                "id": f"call_{draw.randrange(10**6)}",
            }
            for _ in range(3)
        ]
        prompt = f"Task {number}: repair {draw.choice(paths)}.\n"
        written = "".join(json.dumps(one, indent=1) + "\n" for one in calls)
        yield tokenizer(prompt)["input_ids"], tokenizer(written)["input_ids"]


def sessions(path: Path, tokenizer: Any, count: int, longest: int) -> Iterator[Call]:
    """Answers of an assistant in recorded sessions, each after the last `longest` tokens before it."""
    cases = json.loads(path.read_text(encoding="utf8"))["cases"]
    for case in sorted(cases, key=lambda one: one["context_tokens_approx"])[:count]:
        before = ""
        for message in [*case["messages"], {"role": "assistant", "content": case["reference_response"]}]:
            if message["role"] == "assistant":
                prompt = tokenizer(before[-8 * longest :])["input_ids"][-longest:]
                yield prompt, tokenizer(message["content"])["input_ids"][:300]
            before += f"<{message['role']}>\n{message['content']}\n"


class Replay:
    """Counts of one way to draft over a stream."""

    def __init__(self) -> None:
        self.steps = self.accepted = self.nodes = self.asked = self.stored = self.tokens = self.held = 0.0

    def step(self, tokens: Sequence[int], parents: Sequence[int], answer: list[int]) -> int:
        """Accept what a tree holds of the answer; how many tokens the step emits."""
        children = {place: node for node, place in enumerate(zip(parents, tokens, strict=True))}
        above, accepted = -1, 0
        for token in answer:
            if (above, token) not in children:
                break
            above, accepted = children[above, token], accepted + 1
        self.steps, self.accepted, self.nodes = self.steps + 1, self.accepted + accepted, self.nodes + len(tokens)
        return accepted + 1

    def __str__(self) -> str:
        per_call, stored = self.asked / self.steps * 1e6, self.stored / max(self.tokens, 1) * 1e6
        accepted, nodes = self.accepted / self.steps, self.nodes / self.steps
        return f"{accepted:.2f} | {nodes:.1f} | {per_call:.0f} | {stored:.2f} | {self.held:.0f}"


def replayed(stream: Sequence[Call], store: SuffixStore | None) -> Replay:
    """Replay a stream with copies of the running text, and of `store` if there is one."""
    found, memory = Replay(), None if store is None else store.namespace("")
    for prompt, answer in stream:
        text, at = list(prompt), 0
        row = RowCopies(text, memory)
        row.suggest(1)
        while at < len(answer):
            began = time.perf_counter()
            copies = row.suggest(DEPTH)
            found.asked += time.perf_counter() - began
            step = found.step(copies.tokens[:NODES], copies.parents[:NODES], answer[at:])
            text += answer[at : at + step]
            at += step
        if store is not None:
            row.learn()
            began = time.perf_counter()
            store.add("", text)
            store.learn(row.right, row.seen)
            found.stored += time.perf_counter() - began
            found.tokens += len(text)
            found.held = TextIndex.BYTES
    return found


def replayed_by_arctic(stream: Sequence[Call]) -> Replay:
    """Replay a stream with the suffix trees of arctic-inference, which take in answers as they come."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    found, cache = Replay(), SuffixDecodingCache(max_tree_depth=64)
    for number, (prompt, answer) in enumerate(stream):
        text, at = list(prompt), 0
        began = time.perf_counter()
        cache.start_request(number, text)
        found.stored += time.perf_counter() - began
        found.tokens += len(prompt) + len(answer)
        while at < len(answer):
            options = {"max_spec_tokens": NODES, "max_spec_factor": 4.0, "min_token_prob": 0.05, "use_tree_spec": True}
            began = time.perf_counter()
            draft = cache.speculate(number, text[-64:], **options)
            found.asked += time.perf_counter() - began
            step = found.step(draft.token_ids, draft.parents, answer[at:])
            new = answer[at : at + step]
            began = time.perf_counter()
            cache.add_active_response(number, new)
            found.stored += time.perf_counter() - began
            text += new
            at += step
        cache.stop_request(number)
    # It keeps the answers alone.
    found.held = cache._global_tree.estimate_memory() / sum(len(answer) for _, answer in stream)
    return found


def replay(streams: dict[str, list[Call]]) -> None:
    """Print what each way accepts of each stream, and what it takes."""
    columns = "stream", "calls, tokens", "drafted by", "accepted per step", "nodes", "µs a query"
    print(f"| {' | '.join(columns)} | µs to store a token | bytes a token |\n{'|---' * 8}|")
    for name, stream in streams.items():
        size = f"{len(stream)}, {sum(len(answer) for _, answer in stream)}"
        print(f"| {name} | {size} | copies of the running text | {replayed(stream, None)} |")
        print(f"| | | and a memory | {replayed(stream, SuffixStore())} |")
        if find_spec("arctic_inference"):
            print(f"| | | arctic-inference | {replayed_by_arctic(stream)} |", flush=True)


def answer(target: str, calls: Sequence[Call], new_tokens: int) -> None:
    """Print the acceptance length and the processor time of a target's own answers, with a memory and without."""
    model = attach(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval())
    print("| mode | τ without | τ with | processor time without / with | the same texts |\n|---|---|---|---|---|")
    for mode, options in {"greedy": {}, "sampled, T=0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0}}.items():
        store, drafter = SuffixStore(), LookupDrafter()
        tokens, rounds, spent, same = [0, 0], [0, 0], [[], []], True
        for number, (prompt, _) in enumerate(calls):
            ids, texts = torch.tensor([prompt]), []
            for way, memory in enumerate((None, store)):
                torch.manual_seed(number)
                began = time.process_time()
                texts.append(
                    model.generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        assistant=drafter,
                        memory=memory,
                        max_new_tokens=new_tokens,
                        **{"do_sample": False, **options},
                    )
                )
                spent[way].append(time.process_time() - began)
                tokens[way] += drafter.last_stats.tokens
                rounds[way] += drafter.last_stats.rounds
            same = same and torch.equal(*texts)
        ratios = statistics.median(without / with_ for without, with_ in zip(*spent, strict=True))
        whole = sum(spent[0]) / sum(spent[1])
        taus = " | ".join(f"{one / of:.2f}" for one, of in zip(tokens, rounds, strict=True))
        print(f"| {mode} | {taus} | {whole:.2f}, median {ratios:.2f} | {'yes' if same else 'no'} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=Path, help="recorded sessions")
    parser.add_argument("--tokenizer", default=PACKAGED_TARGET)
    parser.add_argument("--target", help="let this model answer in the sessions of --agents")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--calls", type=int, default=60, help="of each stream that is replayed, at most")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.target or given.tokenizer)
    if given.target:
        torch.set_num_threads(1)
        calls = list(sessions(given.agents, tokenizer, given.prompts, given.prompt_tokens))[: given.prompts]
        return answer(given.target, calls, given.new_tokens)
    streams = {
        "files of `email`": list(source_files(tokenizer, given.calls)),
        "tool calls": list(tool_calls(tokenizer, given.calls)),
    }
    if given.agents:
        streams["agents' sessions"] = list(sessions(given.agents, tokenizer, 10, 6000))[: given.calls]
    return replay(streams)


if __name__ == "__main__":
    main()
