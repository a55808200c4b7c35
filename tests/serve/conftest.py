"""Tests of the server need what `hf-dart[test]` installs; without it those of the batcher run alone."""

from __future__ import annotations

from importlib.util import find_spec

_NEEDED = ("fastapi", "openai", "prometheus_client", "uvicorn")
_SERVED = ["test_app.py", "test_load.py", "test_parameters.py", "test_tools.py"]
collect_ignore = [] if all(map(find_spec, _NEEDED)) else _SERVED
