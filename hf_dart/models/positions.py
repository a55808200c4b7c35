"""The reach of a target's positions, and rotary frequencies that follow the length of the text."""

from __future__ import annotations

import sys

from transformers import PreTrainedModel


def moving_rotary(target: PreTrainedModel) -> tuple[int, bool] | None:
    """Return the length beyond which a target chooses other rotary frequencies, by the largest position of a forward.

    And whether they go on changing with every position ("dynamic"), instead of once ("longrope"); None if they stay.
    """
    text = target.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if kind.get("rope_type") == "dynamic":
            return int(text.max_position_embeddings), True
        if kind.get("rope_type") == "longrope":
            return int(kind.get("original_max_position_embeddings") or text.max_position_embeddings), False
    return None


def position_limit(target: PreTrainedModel) -> int:
    """Return the last position that drafts may reach from before it; a text beyond it is drafted on as stock goes on.

    Rotary frequencies that follow the largest position would change for a whole tree when one node crosses the length
    they were trained for.
    """
    moving = moving_rotary(target)
    if moving is not None:
        return moving[0] - 1
    text = target.config.get_text_config(decoder=True)
    table = getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)  # Whisper
    # XLNet gives -1, which means no limit.
    return int(table) - 1 if table and table > 0 else sys.maxsize


def positions_of_table(target: PreTrainedModel) -> int:
    """Return how many positions a target has that looks them up in a table; its forward fails beyond them."""
    rotates = getattr(target.config.get_text_config(decoder=True), "rope_parameters", None)
    return sys.maxsize if rotates else position_limit(target) + 1


def rotary_turn(target: PreTrainedModel) -> tuple[int | None, bool]:
    """Return `moving_rotary`; else that length of Phi-3, which drops its cache there, whatever its frequencies."""
    return moving_rotary(target) or (getattr(target.config, "original_max_position_embeddings", None), False)


def refuse_crossing(
    target: PreTrainedModel,
    prompt: int,  # positions of the longest prompt; 0 where they are not those of its tokens (images)
    cached: int,  # slots of the prompts that are in the cache already
    most: int,  # tokens of the longest prompt and all that may be generated
    shift: int = 0,  # how far their positions lie above their numbers
) -> None:
    """Raise where rotary frequencies would change in the middle of a call, for the text so far and for all rows."""
    trained, grows = rotary_turn(target)
    # The last token is not run through the model.
    if trained is None or most + shift - 1 <= trained:
        return
    if grows or prompt <= trained or 0 < cached <= trained:
        shorter = f"ask for fewer tokens (by {most + shift - 1 - trained}), or " if prompt <= trained else ""
        raise ValueError(
            f"{type(target).__name__} changes its rotary frequencies beyond {trained} positions, for the text so far "
            f"and all rows of a batch too; {shorter}leave assistant= out."
        )
