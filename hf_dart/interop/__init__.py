"""Files of other projects, read and written: original DART checkpoints, n-gram tries, vLLM exports."""
