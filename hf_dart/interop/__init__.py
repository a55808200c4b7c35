"""Files of other projects: published drafters and n-grams, which are read, and heads for vLLM, which are written."""
