"""Draft heads: `DartHead` (`head`), its network (`model`, `drafting`), and what can be put on it."""

from hf_dart.head.head import DartHead

__all__ = ["DartHead"]
