"""Draft trees: scores of candidates, growth (`on_host`, `in_tensors`), costs, copies of earlier text, n-grams."""
