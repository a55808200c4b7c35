"""Packages that call `generate` themselves; `pip install -e '.[tools]'` brings them."""

from importlib.util import find_spec

_NEEDS = {"test_lm_eval.py": "lm_eval", "test_serve.py": "openai"}
collect_ignore = [file for file, package in _NEEDS.items() if find_spec(package) is None]
