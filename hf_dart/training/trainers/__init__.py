"""One trainer per kind of drafter, on `transformers.Trainer`; their options and metrics."""
