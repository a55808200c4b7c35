"""Pace: whether the coming round is drafted, and how much rounds cost.

Verifying copied text needs no draft. A draft is made where the tokens that it is expected to add, by what was accepted
per depth so far, are worth its cost; otherwise the round verifies copies alone. Drafts that do not pay pause, and are
tried less and less often.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from statistics import median
from typing import Any

import numpy as np

from hf_dart.drafters.base import Drafter
from hf_dart.trees.config import TreeConfig
from hf_dart.trees.copies import NOTHING, Copies, CopyCounts, RowCopies, best_size
from hf_dart.trees.costs import Array, RoundCost

_PRIOR = 0.75  # chance that a draft is assumed to be right at a depth, if it was right above
_TRIAL = 3.0  # tokens that drafts may lose before they are known not to pay; half as many after a pause, then a quarter
_COMPARED = 128  # drafts of a row beside copies over which what they add is counted; undrafted rounds until forgotten
# Rounds of a pause; each one is longer by a factor. A trial in 320 rounds costs less than a hundredth of their tokens.
# Drafts that have paid may pay in the next text: there pauses end with the call after 1, 4, 16 and 64 rounds.
_FIRST_WAIT, _LONGEST_WAIT, _LONGER = 64, 320, 4
_LIKELY = 0.5  # tokens that copies are expected to bring where they may be what spares a draft
_MEMORY = 32  # drafts of a row, and rounds, over which running means reach
_NEW_TEXT = 8  # of those drafts, so many of each row still count in the next call, whose text may be of another kind
_SETTLED = 16  # drafted rounds after which drafts that pay are taken to go on
_WARN_AFTER = 2  # pauses with no drafts that paid between them
_LEAD = 4.0  # a row that is ahead of the slowest one by 1 + (its tokens)**0.5 / _LEAD weighs less by a factor of e
_KINDS = 64  # kinds of calls that are remembered

_TIMED_DRAFTS = 9  # last drafts whose median time counts, a third of them at least
_SPEED = 1 / 8  # weight of a round in the running mean of the machine's speed
_TIMED = 1 / 16  # least weight of a round in the running mean of the cost of its size
_FADES = 1 / 256  # of what was measured, in each round: a size that seemed dear once would never be tried again
_LATE = 2.0  # a round that takes longer by more than this factor counts for this factor
_AT_ONCE = 4  # rounds of known sizes that are learnt from together: one by one, each would fill the caches anew

_LOGGER = logging.getLogger(__name__)


def row_weights(emitted: Sequence[int], limits: Sequence[int]) -> list[float]:
    """Return the worth of one more token in each row, 1 in all: a batch is done when its slowest row is.

    Which row will be that is less and less open as rows part: leads that come by chance grow with the root of the text.
    Rows with a limit of 0 take no part.
    """
    slowest = min((tokens for tokens, limit in zip(emitted, limits, strict=True) if limit > 0), default=0)
    rows = zip(emitted, limits, strict=True)
    lead = 1 + slowest**0.5 / _LEAD
    weights = [exp((slowest - tokens) / lead) if limit > 0 else 0.0 for tokens, limit in rows]
    total = sum(weights) or 1.0
    return [weight / total for weight in weights]


@dataclass
class PaceRecord:
    """Measurements of the rounds of one kind of calls; costs are relative, as those of `RoundCost`.

    A new kind begins with what the latest one whose rounds cost the same has measured.
    """

    chances: Array  # [d] of a draft to be right at each depth, if the tree was right above and copies alone are not
    counts: Array  # [d] drafts that each of them was computed from, those that the prior counts for included
    correction: Array  # [N] measured cost of verifying 1 to N nodes per row, divided by its estimate
    timed: Array  # [N] rounds that were measured, fewer the longer ago they are
    paused: int | None = None  # rounds of a pause so far
    pauses: int = 0  # since drafts last paid
    paid: bool = False  # whether they ever did
    rounds: int = 0  # drafted since the last pause
    gained: float = 0.0  # tokens that drafts brought in them beyond copies, less what they cost
    added: float = 0.0  # running mean of what verifying their nodes cost more than copies
    beyond_copies: tuple[float, float] = (_TRIAL, _TRIAL)  # tokens that drafts added to copies, and that were expected
    drafted: tuple[int, int] = (0, 0)  # rows of drafted rounds in all, and the tokens that they emitted
    draft_costs: tuple[float, ...] = ()  # of the last drafts, where they are timed
    looked: tuple[float, ...] = ()  # share of looking for copies in the time of the last rounds without a draft
    copy_counts: CopyCounts = field(default_factory=CopyCounts)  # how often copies were right


@dataclass
class _Compared:
    """A drafted tree of one row that is compared with copies alone, as soon as the text shows how far they are right.

    In a small tree drafted nodes stand in the place of copied ones, so that it may bring less than those.
    """

    row: int
    weight: float  # in rows of equal weight
    expected: float  # tokens that the draft was expected to add
    copies: Copies
    nodes: int  # of the copies that would have been verified
    limit: int  # tokens that the round could have emitted
    emitted: int  # that it did emit
    came: list[int] = field(default_factory=list)  # those, and what came after them


class Pace:
    """Choice of whether each round of one call is drafted, and estimates of what rounds cost.

    `choose` is called before a round and `count` after it; `finish` at the end of the call.
    """

    def __init__(
        self,
        config: TreeConfig,  # its `draft_cost` given or estimated
        device_type: str,  # of the target
        batch: int,  # rows that every round runs
        depth: int,  # tokens of a draft; 0 for a drafter of copied text alone, which is verified in every round
        timed: Collection[str] = (),  # costs in place of which measured ones are used (`timed_costs`)
        records: dict[Hashable, PaceRecord] | None = None,  # by kind, kept from call to call; None keeps nothing
        kind: tuple[Hashable, ...] = (),  # of calls: what costs depend on, and what else acceptance depends on
    ) -> None:
        self._config, self._depth, self._timed = config, depth, timed
        self._chooses = depth > 0 and config.nodes is None
        self._undrafted = 0  # rounds in a row
        self._estimate = config.round_cost(batch, device_type, drafted=False)
        self._verify = self._estimate.verify  # as rounds have corrected it, by the size that trees are filled up to
        self._filled = np.arange(len(self._verify))
        self._left_out = False
        self._spent: dict[str, float] = {}  # seconds of each phase so far
        self._seconds = 0.0  # of a round that costs 1
        self._measured: list[tuple[int, int, float]] = []  # nodes, levels and time of rounds that are to be learnt from
        self._copies_cost = 1.0
        self._copies: Sequence[Copies] = ()
        self._weights: Sequence[float] = ()
        self._alone = 0  # copied nodes that a round without a draft would verify
        self._expects: list[float] = []  # tokens that a draft would add to each row
        self._compared: list[_Compared] = []  # drafted trees that wait for the text
        self._prior = np.full(depth, _PRIOR)
        kinds: dict[Any, PaceRecord] = records or {}
        self._records, self._kind = records, ((*kind[:1], depth, len(self._filled)), kind[1:])
        own, latest = kinds.get(self._kind), reversed([*kinds.items()])  # at once: calls of other threads add theirs
        alike = (one for other, one in latest if other[0] == self._kind[0])
        none, sizes = np.zeros(depth), np.zeros(len(self._filled))
        new = PaceRecord(self._prior, none, sizes + 1, sizes)
        self._record = record = copy.deepcopy(own or next(alike, new))
        self._roots = 0 if record.timed[0] else _AT_ONCE  # rounds of the roots alone that are timed at first
        if own is None:
            kept = {name: getattr(record, name) for name in ("beyond_copies", "looked", "draft_costs")}
            self._record = PaceRecord(none, none, record.correction, record.timed, **kept)
            self._try(record.chances)
        elif record.paid:
            record.counts = np.minimum(record.counts, _NEW_TEXT * batch)
            if record.paused is not None and record.paused >= _LONGER ** (record.pauses - 1):
                self._try(self._prior)
        self._read_corrections()

    @staticmethod
    def timed_costs(config: TreeConfig, device_type: str) -> frozenset[str]:
        """Fields of `config` that are to be measured: "draft_cost", "node_cost", both or none.

        Only on a CPU (elsewhere, timing would wait for the device), and for trees without a given size, as others are
        grown whatever they cost.
        """
        if config.nodes is not None or device_type != "cpu":
            return frozenset()
        open_ones = {name for name in ("draft_cost", "node_cost") if getattr(config, name) is None}
        return frozenset(open_ones - {"node_cost"} if config.verify_costs else open_ones)

    def may_draft(self, rounds: int) -> bool:
        """Return True if any of so many rounds may be drafted: a pause may last longer."""
        return self._config.nodes != 1 and not (self._chooses and self._left_of_pause() > rounds)

    def cost(self, drafted: bool = True) -> RoundCost:
        """Cost of a round, with a draft or (not `drafted`) of copied text alone."""
        return RoundCost(self._cost_of_looks() if drafted else 0.0, self._verify, self._estimate.level)

    def _cost_of_looks(self) -> float:
        """Cost of a draft and of looking at it again: measured, if that was done often enough."""
        known = self._record.draft_costs
        once = median(known) if len(known) >= _TIMED_DRAFTS // 3 else self._config.draft_cost or 0.0
        return once * (1 + self._config.refine)

    def copied_chances(self) -> list[float]:
        """Chances that copies are right (`trees.copies.PRIOR`), by the earlier calls of this kind."""
        return self._record.copy_counts.chances()

    def choose(
        self, copies: Sequence[Copies], weights: Sequence[float], deepest: Sequence[int]
    ) -> tuple[bool, Sequence[Copies]]:
        """Choose whether the coming round is drafted, and return that and what each row may copy."""
        record, self._weights = self._record, weights
        # Costs are relative to rounds of the roots alone.
        due = "node_cost" in self._timed and (self._roots > 0 or record.timed[0] < 1)
        chooses = self._chooses and record.paused is None
        if not (chooses or due):
            return self._config.nodes != 1 and not self._chooses, copies
        self._alone, tokens, self._copies_cost = best_size(copies, weights, self.cost(drafted=False))
        self._copies, likely = copies, tokens >= 1 + _LIKELY
        if due and not likely:
            self._roots -= 1
            return False, [NOTHING] * len(copies)
        if not chooses:
            return not self._chooses, copies
        cost = self._cost_of_drafting()
        self._expects = [self._expected(one, most) for one, most in zip(copies, deepest, strict=True)]
        beyond = max(record.beyond_copies[0] / record.beyond_copies[1], 0.0)
        rows = zip(weights, copies, self._expects, strict=True)
        added = sum(weight * more * (beyond if self._alone and one else 1.0) for weight, one, more in rows)
        # The first drafts of a process take longer than others; what adds little is not timed that often.
        costs = record.draft_costs
        unknown = "draft_cost" in self._timed and len(costs) < _TIMED_DRAFTS and not record.pauses
        unknown &= len(costs) < _TIMED_DRAFTS // 3 or added >= min(1.0, *costs)
        trial = (unknown or not record.rounds) and not likely
        drafted = trial or added >= cost * tokens / self._copies_cost
        # What is verified meanwhile waits for the drafter, in memory: it is asked now and then, whatever copies bring.
        drafted |= self._undrafted >= _LONGEST_WAIT
        self._undrafted = 0 if drafted else self._undrafted + 1
        if self._alone and not drafted:
            came, expected = (known + (_TRIAL - known) / _COMPARED for known in record.beyond_copies)
            record.beyond_copies = came, expected
        if not (drafted or likely) and self._drafts_bring() < cost:  # drafts pay in no other rounds
            record.paused, record.pauses = 0, record.pauses + 1
        return drafted, copies

    def count(
        self,
        drafted: bool,  # what `choose` said
        tokens: Sequence[Sequence[int]],  # that each row emitted
        limits: Sequence[int],  # tokens that each could have emitted; rows with 0 took no part
        nodes: int,  # of its trees, the root included
        levels: int,  # below the root
        seconds: Mapping[str, float],  # spent in each phase of the call so far
    ) -> None:
        """Learn from a round."""
        record, emitted = self._record, [len(row) for row in tokens]
        if self._timed:
            self._time(drafted, nodes, levels, seconds)
        if not self._chooses:
            return
        rows = 1 / (sum(weight * weight for weight in self._weights) or 1.0)  # as many of equal weight
        waiting, self._compared = self._compared, []
        for one in waiting:
            self._compare(one, tokens[one.row])
        if record.paused is not None:
            record.paused += 1
            if not self._left_of_pause():
                self._try(self._prior)
        if not drafted:
            return
        cost = self._cost_of_drafting()
        for row, share in enumerate(self._weights):
            if share:
                weight, copies, limit, more = share * rows, self._copies[row], limits[row], self._expects[row]
                one = _Compared(row, weight, more, copies, self._alone, limit, emitted[row])
                right = self._compare(one, tokens[row])
                if right is not None:
                    self._learn(weight, right, emitted[row] - 1, min(self._depth, limit - 1))
                    record.gained += share * (max(emitted[row] - 1 - right, 0) - cost)
        record.rounds += 1
        added = self.cost(drafted=False).of(nodes, levels) - self._copies_cost
        record.added += (added - record.added) / min(record.rounds, _MEMORY)
        record.drafted = (record.drafted[0] + sum(limit > 0 for limit in limits), record.drafted[1] + sum(emitted))
        if record.rounds >= _SETTLED and record.gained > 0:
            record.pauses, record.paid = 0, True

    def finish(self, drafter: Drafter[Any], copied: Sequence[RowCopies] = ()) -> None:
        """Keep what the rounds and the copies of each row have shown, and warn once if the drafts do not pay."""
        record, records = self._record, self._records
        self._correct()
        record.copy_counts = copy.copy((records or {}).get(self._kind, record).copy_counts)  # others may have added
        for row in copied if self._timed else ():  # with costs as numbers, equal calls make equal rounds
            row.learn()
            record.copy_counts.add(row.right, row.seen)
        if records is not None:
            records.pop(self._kind, None)
            records[self._kind] = record
            for oldest in list(records)[:-_KINDS]:
                records.pop(oldest, None)
        if record.paid or record.pauses < _WARN_AFTER or drafter.warned:
            return
        drafter.warned = True
        rows, tokens = record.drafted
        _LOGGER.warning(
            f"The drafts of this {type(drafter).__name__} brought {tokens / rows:.2f} tokens per round, which is less "
            "than they cost here, so drafting paused; the output is the same. Likely causes: a drafter that was "
            "trained too little, or for another target; a prompt without the chat template that it was trained with; "
            "text of another language or kind; thinking switched on or off against its training; or costs of another "
            "machine (`hf-dart profile` measures them)."
        )

    def _cost_of_drafting(self) -> float:
        """Cost of a draft and its nodes, above that of copies alone."""
        return self._cost_of_looks() + max(self._record.added, 0.0)

    def _expected(self, copies: Copies, deepest: int) -> float:
        """Tokens that a draft is expected to add to one row, whose tree is at most `deepest` deep."""
        depth = min(max(deepest, 0), self._depth)
        tokens, on_draft, on_copies = 0.0, 0.0, 1.0
        chances, rights = self._record.chances[:depth].tolist(), copies.right(depth, self._alone).tolist()
        for chance, right in zip(chances, rights, strict=True):
            on_draft = (on_draft + on_copies - right) * chance  # of what was right above
            tokens, on_copies = tokens + on_draft, right
        return tokens

    def _left_of_pause(self) -> int:
        """Return the rounds for which no draft will be made."""
        paused, pauses = self._record.paused, self._record.pauses
        return 0 if paused is None else int(min(_FIRST_WAIT * _LONGER ** (pauses - 1), _LONGEST_WAIT)) - paused

    def _drafts_bring(self) -> float:
        """Tokens that a draft is expected to add where there are no copies."""
        return self._expected(NOTHING, self._depth)

    def _compare(self, one: _Compared, tokens: Sequence[int]) -> int | None:
        """Compare a drafted tree with copies alone; return how many of these were right, None if that is still open."""
        one.came += tokens
        right = one.copies.accepted(one.came, one.nodes)
        if right is None:
            self._compared.append(one)
        elif one.nodes and one.copies:
            came, expected = (known * (1 - one.weight / _COMPARED) for known in self._record.beyond_copies)
            more = one.emitted - min(right + 1, one.limit)
            self._record.beyond_copies = came + one.weight * more, expected + one.weight * one.expected
        return right

    def _learn(self, weight: float, right: int, accepted: int, deepest: int) -> None:
        """Learn what was `accepted` of a row's tree, which could have been `deepest` deep; `weight` is in drafts.

        Of the depths that were `right` by copies a draft shows nothing, nor below its first wrong one.
        """
        here = slice(right, max(min(accepted + 1, deepest), right))
        depths = np.arange(1, self._depth + 1)[here]
        record = self._record
        record.counts[here] = np.minimum(record.counts[here] + weight, _MEMORY)
        step = np.minimum(weight / record.counts[here], 1)
        record.chances[here] += ((depths <= accepted) - record.chances[here]) * step

    def _try(self, chances: Array) -> None:
        """Begin to draft, at first or after a pause, with chances [d] that little is known of."""
        record = self._record
        record.paused, record.chances, record.rounds, record.gained, record.added = None, chances.copy(), 0, 0.0, 0.0
        # After n rejected drafts, n * cost tokens are lost, and the estimate is down to prior * count / (count + n).
        prior, cost, loss = self._drafts_bring(), self._cost_of_drafting(), _TRIAL / 2 ** min(record.pauses, 2)
        record.counts = np.full(self._depth, min(loss / max(prior - cost, prior / 4, 1e-9), _MEMORY))

    def fill_up(self, size_of: Callable[[int], int] | None) -> None:
        """Count rounds by the size that trees of so many nodes are filled up to; None: they are run as they are."""
        self._correct()
        sizes = range(1, len(self._filled) + 1)
        self._filled = np.array([min(nodes if size_of is None else size_of(nodes), sizes[-1]) - 1 for nodes in sizes])
        self._read_corrections()

    def leave_out(self) -> None:
        """Take no time of the round that is under way, in which something was compiled, and wait for no text of it."""
        self._left_out, self._compared = True, []

    def _time(self, drafted: bool, nodes: int, levels: int, seconds: Mapping[str, float]) -> None:
        """Measure a round: its draft relative to the rest of it, and that rest relative to those of other sizes.

        A busy machine slows a round as a whole, and rounds in a row alike. Of a draft's time, what looking for copies
        takes in rounds without one is no cost of the draft.
        """
        spent = {name: seconds.get(name, 0.0) for name in ("draft", "grow", "verify", "walk", "commit")}
        draft, grow, *rest = (spent[name] - self._spent.get(name, 0.0) for name in spent)
        self._spent, record = spent, self._record
        left_out, self._left_out = self._left_out, False
        if sum(rest) <= 0 or left_out:
            return
        is_draft = drafted and self._depth > 0
        if not is_draft:
            record.looked = (*record.looked[1 - _TIMED_DRAFTS :], (draft + grow) / (draft + grow + sum(rest)))
        share = median(record.looked) if len(record.looked) >= _TIMED_DRAFTS // 3 else 0.0
        verify = sum(rest) / (1 - share)  # and walk, commit, and what a round without a draft spends on copies
        if is_draft and "draft_cost" in self._timed:
            expected = self.cost(drafted=False).of(nodes, levels)
            cost = max(draft + grow - share * verify, 0.0) / verify * expected / (1 + self._config.refine)
            record.draft_costs = (*record.draft_costs[1 - _TIMED_DRAFTS :], cost)
        if "node_cost" in self._timed:
            self._measured.append((nodes, levels, verify))
            if len(self._measured) == _AT_ONCE or record.timed[self._filled[nodes - 1]] < 1:
                self._correct()

    def _correct(self) -> None:
        """Correct the costs of trees by the rounds that were measured."""
        record = self._record
        if self._measured and not self._seconds:  # by the first round alone, it would count for many
            cost = self.cost(drafted=False)
            self._seconds = median(verify / cost.of(nodes, levels) for nodes, levels, verify in self._measured)
        for nodes, levels, verify in self._measured:
            size, expected = int(self._filled[nodes - 1]), self.cost(drafted=False).of(nodes, levels)
            late = min(max(verify / (self._seconds * expected), 1 / _LATE), _LATE)
            self._seconds *= late**_SPEED
            record.timed *= 1 - _FADES
            record.timed[size] += 1
            record.correction[size] *= late ** max(1 / (1 + record.timed[size]), _TIMED)
            if size > 0:
                record.correction[1:] *= (record.correction[size] / record.correction[1:]) ** _FADES
            # Between sizes that were timed, straight lines; the cost of a root alone stays 1.
            sizes = record.timed.nonzero()[0]
            record.correction = np.interp(np.arange(len(record.timed)), sizes, record.correction[sizes])
            self._seconds *= record.correction[0]
            record.correction /= record.correction[0]
            self._read_corrections()
        self._measured = []

    def _read_corrections(self) -> None:
        self._verify = (self._estimate.verify * self._record.correction)[self._filled]
