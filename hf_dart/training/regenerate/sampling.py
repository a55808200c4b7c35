"""Options of sampling new text."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hf_dart.errors import LEAST_TEMPERATURE, check_fields, refuse_unknown


@dataclass(frozen=True)
class Sampling:
    """Options with which a target continues a text."""

    share: float = 1.0  # of the rows, relative to the others of a mixture
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, least={"top_k": 0}, shares=("top_p", "min_p"))
        for name in ("share", "repetition_penalty"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; give a number above 0.")
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; give 0, or {LEAST_TEMPERATURE:g} or more.")
        if not self.temperature and (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0):
            raise ValueError("top_p, top_k and min_p choose among sampled tokens; give a temperature too.")

    @classmethod
    def parse(cls, text: str) -> Sampling:
        """Read "SHARE NAME=NUMBER ...", such as "0.3 temperature=0.8 top_p=0.95"."""
        share, *words = text.split() or [""]
        try:
            pairs = dict(word.split("=") for word in words)
            given = {name: int(number) if name == "top_k" else float(number) for name, number in pairs.items()}
            shared = float(share)
        except ValueError as error:
            raise ValueError(f"{text!r} does not read like '0.3 temperature=0.8 top_p=0.95'.") from error
        refuse_unknown(given, {one.name for one in fields(cls)} - {"share"}, "Sampling has no", ValueError)
        return cls(share=shared, **given)  # type: ignore[arg-type]

    def for_generate(self) -> dict[str, Any]:
        """Fields of a `GenerationConfig`: all that the target's own could set otherwise."""
        options: dict[str, Any] = {"do_sample": self.temperature > 0, "repetition_penalty": self.repetition_penalty}
        if self.temperature:
            options |= {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return options
