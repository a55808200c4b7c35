"""`hf_dart.compile`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from hf_dart.drafters.base import Drafter
from hf_dart.drafters.compatibility import unwrapped
from hf_dart.engine.config import EngineConfig
from hf_dart.engine.engine import Engine

_LOGGER = logging.getLogger(__name__)


def compile(
    model: PreTrainedModel, drafter: Any, *, progress: Callable[[str], object] | None = None, **options: Any
) -> Engine:
    """Let `model.generate(..., assistant=drafter)` run rounds that are compiled, and on a GPU captured as one launch.

    The tokens are the same. Rounds are made when a call first needs one of its batch size, tree and length, which
    takes from seconds to minutes with a backend that generates code; later calls begin at once. Whole rounds are
    taken of calls of a [`DartHead`], greedy and sampled, of any batch size, of which tokens, length and end-of-text
    tokens are asked for: no logits processors but temperature, top-k, top-p, min-p, repetition penalty, minimum lengths
    and suppressed tokens, no stopping criteria of the user's own, no collected scores. Trees have the size that
    `TreeConfig.nodes` says, or the device's, and copies in them (`TreeConfig.lookup`) are no longer than a draft.

    As rows of a batch end, rounds of fewer rows take over: 4, 2 or 1 of them in the place of 8. A call that has to do
    without goes on in those that there are, and the next one that wants them makes them.

    Of other calls, also those of other drafters and those with edit passes (`TreeConfig.refine`), the forward of the
    target alone is captured, and a head's pass. Where that cannot be (caches of more than keys and values, running
    states that go through trees level by level, rotary frequencies that follow the text, several devices, forward
    hooks, collected hidden states), they run as if nothing had been compiled. The first of each kind warns and says
    why.

    Args:
        model: the target, or a PEFT wrapper of it.
        drafter: the head, which keeps what is made; `drafter.engine = None` turns it off.
        progress: is told, in a sentence, what is being made; by default the log (level INFO).
        options: fields of [`EngineConfig`].

    Returns:
        The engine.

    Raises:
        ValueError: the drafter is not for this target, or an option is out of range.
        TypeError: it is none of ours.
    """
    target = unwrapped(model)
    if not isinstance(drafter, Drafter):
        raise TypeError(f"compile takes a hf_dart drafter such as DartHead, not {type(drafter).__name__}.")
    drafter.check_target(target)
    drafter.engine = Engine(target, EngineConfig(**options), progress or _LOGGER.info)
    return drafter.engine
