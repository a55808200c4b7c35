"""N-gram tables: `NgramTable` (`table`), counting and merging (`build`), looking up on devices (`lookup`)."""

from hf_dart.trees.ngram.table import NgramSpec, NgramTable

__all__ = ["NgramSpec", "NgramTable"]
