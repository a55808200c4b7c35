"""View of one call: which tokens were drafted, every tree and the path through it, where the time went."""

from hf_dart.view.page import View
from hf_dart.view.statistics import summary

__all__ = ["View", "summary"]
