"""The table of published drafters: what stands in it, and which target is which."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from transformers import AutoConfig, Qwen3Config

from hf_dart.hub.known_drafters import published_drafters, published_table
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET, head_path, target_path

SIZES = {"hidden_size": 2560, "num_hidden_layers": 36, "vocab_size": 151936}


def test_the_table_is_whole() -> None:
    """Each target once; drafters whose acceptance is known first, from the largest on."""
    table = published_table()
    assert date.fromisoformat(table["date"]) <= date.today()
    names = [known["name"] for known in table["targets"]]
    assert len({*names}) == len(names)
    for known in table["targets"]:
        assert known.keys() <= {"name", "sizes", "drafters"}
        assert known.get("sizes", {}).keys() <= {"model_type", "hidden_size", "num_hidden_layers", "vocab_size"}
        assert all(one.keys() - {"acceptance"} == {"repository", "source"} for one in known["drafters"])
        assert all(one["repository"].count("/") == 1 or one["repository"] == "packaged" for one in known["drafters"])
        taus = [one.get("acceptance", 0) for one in known["drafters"]]
        assert taus == sorted(taus, reverse=True) != []


def test_which_target_is_which() -> None:
    for name, sizes, known in (
        ("Qwen/Qwen3-4B", SIZES, "Qwen/Qwen3-4B"),
        ("/models/qwen3-4b/", SIZES, "Qwen/Qwen3-4B"),
        ("", SIZES, "Qwen/Qwen3-4B"),
        ("someone/a-fine-tune", SIZES, "Qwen/Qwen3-4B"),
        ("Qwen/Qwen3-4B", {**SIZES, "hidden_size": 64}, ""),
        ("Qwen/Qwen3.8-27B", {**SIZES, "hidden_size": 64}, "Qwen/Qwen3.8-27B"),
        ("", {**SIZES, "vocab_size": 151937}, ""),
    ):
        config = Qwen3Config(**sizes)
        config.name_or_path = name
        found, drafters = published_drafters(config)
        assert (found, bool(drafters)) == (known, bool(known))
    _, (packaged,) = published_drafters(AutoConfig.from_pretrained(PACKAGED_TARGET))
    assert head_path(packaged["repository"]) == str(PACKAGED_HEAD)
    assert head_path("JetSpec/jetspec-qwen3-8b") == "JetSpec/jetspec-qwen3-8b"


def test_the_folder_of_a_recipe_may_be_in_ones_own() -> None:
    """No shell has expanded the names that a recipe gives."""
    assert target_path("~/gemma-3-270m") == str(Path.home() / "gemma-3-270m")
    assert target_path("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
