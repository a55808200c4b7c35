"""One trainer per kind of drafter, on `transformers.Trainer`, and what it is told and measures."""
