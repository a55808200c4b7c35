"""Text in the target's own words, for training a head on what it will meet.

    python examples/demo_pair/regenerate.py corpus.bin regenerated.bin --minutes 20

Prefixes of the corpus are continued by the target with stock `generate`: 40 % sampled at temperature 1, 30 %
greedy with a repetition penalty of 1.1, 30 % plain greedy. A head drafts behind the target's text, not behind
the corpus; of all that can be changed about its training, this moves the acceptance most. Appends whole
batches, so that a training run may read the file while it grows.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

MIX = (  # share of the batches, how they are continued
    (0.4, {"do_sample": True, "temperature": 1.0, "top_k": 0}),
    (0.3, {"do_sample": False, "repetition_penalty": 1.1}),
    (0.3, {"do_sample": False}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="uint16 token ids, as corpus.py writes them")
    parser.add_argument("output", type=Path, help="appended to; the same format")
    parser.add_argument("--target", default="hf_dart/demo_pair/target")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row, prefix included")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    random = np.random.default_rng(arguments.seed)
    dtype = getattr(torch, arguments.dtype)
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype).eval()
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    corpus = np.memmap(arguments.corpus, dtype=np.uint16, mode="r")
    shares, options = zip(*MIX, strict=True)

    began, total, batches = time.monotonic(), 0, 0
    with arguments.output.open("ab") as output:
        while time.monotonic() - began < 60 * arguments.minutes:
            # One prefix length per batch: no padding, so that a row's text is what it would be alone.
            prefix = int(random.integers(32, 129))
            starts = random.integers(0, len(corpus) - prefix, arguments.batch_size)
            rows = np.stack([corpus[start : start + prefix] for start in starts]).astype(np.int64)
            config = GenerationConfig(
                max_new_tokens=arguments.length - prefix,
                eos_token_id=eos,
                pad_token_id=pad,
                **options[random.choice(len(options), p=shares)],
            )
            ids = torch.from_numpy(rows)
            sequences = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            for row in sequences.numpy():
                written = row[row != pad]
                if written[-1] != eos:
                    written = np.append(written, eos)
                written.astype(np.uint16).tofile(output)
                total += len(written)
            output.flush()
            batches += 1
            rate = total / (time.monotonic() - began)
            print(f"{batches} batches, {total} tokens, {rate:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
