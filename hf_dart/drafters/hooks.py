"""The decoding loop, as drafters reach it from below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Drafters stand below the decoding loop, and yet `from_target` and `from_pretrained` attach the target that they are
# given, and `drafter.generate` runs a call. `hf_dart/__init__.py` says here how that module is imported on first use,
# so that no drafter imports it.
decoding: Callable[[], Any]
"""`hf_dart.decoding.api`."""
