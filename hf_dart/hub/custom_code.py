"""The `custom_generate/` by which a folder or repository of a drafter is run, without `hf_dart` being imported."""

from __future__ import annotations

from pathlib import Path

_SOURCE = Path(__file__).parent / "custom_generate"


def custom_generate_files() -> dict[str, bytes]:
    """Return the files that every saved drafter has, by their path in its folder."""
    files = sorted(file for file in _SOURCE.iterdir() if file.is_file())
    return {f"{_SOURCE.name}/{file.name}": file.read_bytes() for file in files}


def write_custom_generate(folder: Path) -> None:
    """Write them to a folder, for `generate(..., custom_generate=folder, trust_remote_code=True)`."""
    for name, content in custom_generate_files().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
