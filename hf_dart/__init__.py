"""Lossless, faster `model.generate()`: DART draft heads, token trees, exact verification."""

from hf_dart.configuration import DartConfig, TreeConfig
from hf_dart.head import DartHead
from hf_dart.version import __version__

__all__ = ["DartConfig", "DartHead", "TreeConfig", "__version__"]
