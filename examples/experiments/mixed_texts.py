"""Simulated calls of texts that drafts are more and less often right about: what the choice to draft makes of them.

    python examples/experiments/mixed_texts.py

Of each text the chance is drawn that a draft's first token is right; the next ones are with the chance `NEXT`. A
drafted round costs `DRAFTED`, another one 1. Printed are the tokens by the cost of their rounds, where drafts are made
as `decoding.pace` chooses, where each text has drafts or not as is best for it, and the least of texts without drafts,
of which 1 is best.
"""

from __future__ import annotations

import random
from statistics import mean
from typing import Any

from hf_dart import LookupDrafter, TreeConfig
from hf_dart.decoding.pace import Pace, PaceRecord
from hf_dart.trees.copies import NOTHING

NEXT, DEPTH, NODES = 0.45, 8, 8
VERIFIED, DRAFT = 1.33, 0.15
DRAFTED = VERIFIED + DRAFT
KINDS = ((0.02,), (0.1,), (0.1, 0.5), (0.1, 0.1, 0.1, 0.5), (0.1, 0.3, 0.5, 0.7), (0.3, 0.35, 0.4), (0.5, 0.6))
SILENT = LookupDrafter()
SILENT.warned = True
CONFIG = TreeConfig(draft_cost=DRAFT, verify_costs=((1, 1.0), (NODES, VERIFIED)))


def played(chance: float, tokens: int, records: dict[Any, PaceRecord], drawn: random.Random) -> float:
    """Tokens by cost of one call of a text with this chance."""
    pace, left, cost = Pace(CONFIG, "cpu", 1, DEPTH, records=records), tokens, 0.0
    while left:
        drafted, _ = pace.choose([NOTHING], [1.0], [min(DEPTH, left - 1)])
        new, right = 1, chance
        while drafted and new < min(DEPTH + 1, left) and drawn.random() < right:
            new, right = new + 1, NEXT
        pace.count(drafted, [[0] * new], [left], NODES if drafted else 1, 3 if drafted else 0, {})
        left, cost = left - new, cost + (DRAFTED if drafted else 1.0)
    pace.finish(SILENT)
    return tokens / cost


def main() -> None:
    names = ("tokens of a call", "chances of its texts", "as chosen", "at best", "least of those without drafts")
    print("|", " | ".join(names), "|\n" + "|---" * 5 + "|")
    for tokens in (48, 128, 400):
        for kinds in KINDS:
            found: dict[float, list[float]] = {chance: [] for chance in kinds}
            for seed in range(40):
                drawn, records = random.Random(seed), dict[Any, PaceRecord]()
                for _ in range(20):
                    chance = drawn.choice(kinds)
                    found[chance].append(played(chance, tokens, records, drawn))
            best = {chance: max(1.0, (1 + chance / (1 - NEXT)) / DRAFTED) for chance in kinds}
            least = min((mean(found[chance]) for chance in kinds if best[chance] == 1), default=None)
            chosen = mean(mean(found[chance]) for chance in found)
            cells = [f"{chosen:.2f}", f"{mean(best[chance] for chance in found):.2f}", f"{least:.2f}" if least else ""]
            print("|", " | ".join([str(tokens), ", ".join(map(str, kinds)), *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
