"""Draft trees: what candidates are worth (`scores`), how they grow (`on_host`, `in_tensors`), copies and n-grams."""
