"""What drafting costs where no draft ever pays: an untrained head, sampling at T = 1, beside stock's own steps.

    python examples/experiments/pauses.py --batch 1 4 --new-tokens 500

Ratios are of the time that one thread computed for (`time.thread_time`), which other processes on the machine change
little; calls are interleaved, and their texts compared. `--head` takes a trained head in place of the untrained one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hf_dart import DartHead
from hf_dart.bench.pair import load_pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--new-tokens", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--head", action="store_true", help="the packaged head")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, trained, tokenizer, *_ = load_pair()
    head = trained if arguments.head else DartHead.from_target(model, tokenizer=tokenizer).eval()
    spec = find_spec("_pytest")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The prompts are from pytest's source: install pytest.")
    text = (Path(spec.submodule_search_locations[0]) / "fixtures.py").read_text(encoding="utf8")
    ids = torch.tensor(tokenizer(text)["input_ids"])

    def timed(prompts: torch.Tensor, **options: Any) -> tuple[float, torch.Tensor]:
        torch.manual_seed(5)
        began = time.thread_time()
        written = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=arguments.new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            eos_token_id=None,
            **options,
        )
        return time.thread_time() - began, written

    print("| batch | x stock | rounds | paused | plain | τ |\n|---|---|---|---|---|---|")
    for batch in arguments.batch:
        prompts = torch.stack([ids[300 * row : 300 * row + 64] for row in range(batch)])
        ratios = []
        for repeat in range(arguments.repeats + 1):
            (stock, expected), (ours, written) = timed(prompts), timed(prompts, assistant=head)
            if not torch.equal(expected, written):
                sys.exit("The texts differ.")
            if repeat:  # the first one warms up
                ratios.append(stock / ours)
        stats = head.last_stats
        counts = f"{stats.rounds} | {stats.paused_rounds} | {stats.plain_rounds} | {stats.tau:.2f}"
        print(f"| {batch} | {statistics.median(ratios):.3f} | {counts} |", flush=True)


if __name__ == "__main__":
    main()
