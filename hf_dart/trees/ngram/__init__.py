"""N-gram tables: `NgramTable` (`table`), counting and merging (`build`)."""
