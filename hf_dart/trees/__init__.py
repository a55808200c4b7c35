"""Draft trees: scores of candidates, growth (`on_host`), costs, copies of earlier text, n-grams."""
