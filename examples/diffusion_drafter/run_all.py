"""Train all drafters of `train.py`, one after the other, and compare them: the tables of the model card.

    python examples/diffusion_drafter/run_all.py corpus.bin regenerated runs

A run that was interrupted is given the same words again: what is trained stays, what was begun goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import process_time

import torch
from compare import compare, options, tables, write
from train import KINDS, plan_of, plan_options, train


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[plan_options(), options()],
    )
    parser.add_argument("runs", type=Path, help="where all of them are saved")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for kind in arguments.kinds:
        start = process_time()
        train(kind, arguments.runs / kind, plan_of(arguments))
        print(f"{kind}: {(process_time() - start) / 60:.1f} CPU minutes", flush=True)
    report = compare(arguments.runs, arguments)
    write(report, arguments.json)
    print(tables(report))


if __name__ == "__main__":
    main()
