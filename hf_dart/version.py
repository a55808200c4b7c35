__version__ = "0.1.0"

INSTALLED_FROM = "./hf-dart"
"""What `pip install` takes: a clone of hf-dart, as long as it is not on PyPI."""
