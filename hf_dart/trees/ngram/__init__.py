"""N-gram tables: `NgramTable` (`table`), counting and merging (`build`)."""

from hf_dart.trees.ngram.table import NgramSpec, NgramTable

__all__ = ["NgramSpec", "NgramTable"]
