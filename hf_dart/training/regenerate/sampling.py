"""How new text is drawn: for `generate` and for a server."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from hf_dart.errors import LEAST_TEMPERATURE


@dataclass(frozen=True)
class Sampling:
    """How a target continues a text.

    Args:
        share: of the batches, relative to the others of a mixture.
        temperature: 0 is greedy.
        top_p, top_k, min_p: which tokens can be drawn; 1, 0 and 0 allow all.
        repetition_penalty: 1 is none.

    Raises:
        ValueError: a field is out of range.
    """

    share: float = 1.0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        ranges = {
            "share": (self.share > 0, "a number above 0"),
            "temperature": (
                self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE,
                f"0, or {LEAST_TEMPERATURE:g} or more",
            ),
            "top_p": (0 < self.top_p <= 1, "a number above 0 and up to 1"),
            "top_k": (self.top_k >= 0, "0 or more"),
            "min_p": (0 <= self.min_p < 1, "a number from 0 to below 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "a number above 0"),
        }
        for name, (right, wanted) in ranges.items():
            if not (right and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} is {getattr(self, name)}; give {wanted}.")
        if not self.temperature and (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0):
            raise ValueError("top_p, top_k and min_p choose among sampled tokens; give a temperature too.")

    @classmethod
    def parse(cls, text: str) -> Sampling:
        """From "SHARE NAME=NUMBER ...", such as "0.3 temperature=0.8 top_p=0.95".

        Raises:
            ValueError: it does not read so.
        """
        share, *words = text.split() or [""]
        names = {one.name for one in fields(cls)} - {"share"}
        try:
            given: dict[str, Any] = {"share": float(share)}
            for word in words:
                name, number = word.split("=")
                given[name] = int(number) if name == "top_k" else float(number)
        except ValueError as error:
            raise ValueError(f"{text!r} does not read like '0.3 temperature=0.8 top_p=0.95'.") from error
        if unknown := given.keys() - names - {"share"}:
            raise ValueError(f"{text!r} names {sorted(unknown)[0]!r}; give any of {', '.join(sorted(names))}.")
        return cls(**given)

    def for_generate(self) -> dict[str, Any]:
        """Fields of a `GenerationConfig`: all that the target's own could set otherwise."""
        options: dict[str, Any] = {"do_sample": self.temperature > 0, "repetition_penalty": self.repetition_penalty}
        if self.temperature:
            options |= {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return options

    def for_server(self) -> dict[str, Any]:
        """Fields of an OpenAI-style request; of those that not every server knows, only what is not neutral.

        A server must then not fill them in from the model's own: `vllm serve --generation-config vllm`.
        """
        options: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
        neutral = asdict(Sampling())
        known = ("top_k", "min_p", "repetition_penalty")
        return options | {name: getattr(self, name) for name in known if getattr(self, name) != neutral[name]}
