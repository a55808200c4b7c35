"""Cards: written from what is known, nothing else; what people wrote stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, constants
from support.hub import card_errors
from support.sentences import refused
from support.tiny import tiny_diffusion_drafter, tiny_eagle_drafter
from support.tiny import tiny_target as llama_target
from support.tiny_training import LENGTHS, tiny_head, tiny_target, tiny_trainer, token_rows

import hf_dart
from hf_dart.drafters.registry import registered, trainers
from hf_dart.hub.card import BEGIN, END, has_markers, render_card
from hf_dart.hub.download import cached_commit
from hf_dart.hub.facts import TRAINING_RECORD, HeadFacts
from hf_dart.hub.kinds import KINDS
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET
from hf_dart.hub.tables import aligned, as_table, markdown
from hf_dart.training.recipe import parser
from hf_dart.training.record import training_record

registered()  # fills KINDS
CARDS = Path(__file__).parents[2] / "model_cards"
BENCH = CARDS / "demo_pair" / "bench.json"


def facts(**known: Any) -> HeadFacts:
    return HeadFacts.read(PACKAGED_HEAD, **known)


def front_matter(card: str) -> dict[str, Any]:
    text = card.split("---\n")[1]
    assert card_errors(text) == []
    return yaml.safe_load(text)


def test_what_cards_import_is_exported_and_trained() -> None:
    for kind in KINDS.values():
        drafter = getattr(hf_dart, kind.drafter.__name__)
        assert drafter.__name__ in hf_dart.__all__
        assert drafter is kind.drafter
        if kind.trained_as is not None:
            assert trainers()[kind.trained_as][0] is drafter
            assert kind.trained_as in parser(kind.trained_as).format_help()


def measured(bench: Path = BENCH) -> list[dict[str, Any]]:
    """What a committed bench says of its head."""
    results = json.loads(bench.read_text(encoding="utf8"))["results"]
    return [one for one in results if one["method"] == "hf_dart"]


ROWS = sum(one["compared"]["rows"] for one in measured())


def test_the_cards_of_the_pairs_are_what_the_library_writes() -> None:
    for pair in (PACKAGED_HEAD.parent, CARDS.parent / "examples" / "deep_pair"):
        folder = CARDS / pair.name
        card, bench = (folder / "README.md").read_text(encoding="utf8"), folder / "bench.json"
        assert has_markers(card)
        assert render_card(HeadFacts.read(pair / "head", bench=bench), card) == card
        assert f"| 1 | greedy | hf_dart | {measured(bench)[0]['tokens_per_second']['median']:.0f} |" in card


def test_a_card_says_what_is_known_and_nothing_else() -> None:
    card = render_card(facts())
    tags = ["hf-dart", "dart", "speculative-decoding", "draft-model", "custom_generate"]
    assert front_matter(card) == {"library_name": "hf-dart", "pipeline_tag": "text-generation", "tags": tags}
    assert "## What is exact" in card
    assert "| options | selector_rank 128 |" in card
    for absent in ("## Measured", "## Training", "## Use", "In the runs above", "None", "revision"):
        assert absent not in card
    said: dict[str, Any] = {"base_model": "them/py8m", "license": "apache-2.0", "language": ["code"]}
    said |= {"datasets": ["them/python"]}
    known = facts(bench=BENCH, repository="me/py8m-dart", tags=("python",), **said)
    card = render_card(known)
    matter = front_matter(card)
    assert {**said, "base_model_relation": "adapter"}.items() <= matter.items()
    assert matter["tags"][-1] == "python"
    assert card.count("# py8m-dart\n") == 1
    assert 'DartHead.from_pretrained("me/py8m-dart", target=model)' in card
    assert as_table(json.loads(BENCH.read_text(encoding="utf8"))) in card
    assert f"in float32, {ROWS} of {ROWS} rows were the same" in card
    assert render_card(known, card) == card


def test_rows_that_differ_are_not_passed_over(tmp_path: Path) -> None:
    bench: Any = json.loads(BENCH.read_text(encoding="utf8"))
    ours = [one for one in bench["results"] if one["method"] == "hf_dart"]
    ours[0]["compared"] |= {"near_ties": 2}
    ours[1]["compared"] |= {"differences": 1, "generator": False}
    (tmp_path / "bench.json").write_text(json.dumps(bench), encoding="utf8")
    card = render_card(facts(bench=tmp_path / "bench.json"))
    assert f"{ROWS - 3} of {ROWS} rows were the same; 2 parted at a near-tie; 1 differed; the generator was not" in card


def test_columns_of_tables_are_aligned() -> None:
    text = "\n".join(["Some `words` here.", "", *markdown(["name", "ms"], [["a|b", "1.50"], ["**c**", "12.25"]])])
    assert r"| a\|b | 1.50 |" in text
    assert aligned(text).splitlines() == ["Some words here.", "", "name  ms", "---   ---", "a|b   1.50", "c     12.25"]


def test_the_training_is_told_by_the_trainer(tmp_path: Path) -> None:
    target = tiny_target()
    target.config.name_or_path = "them/tiny"
    rows, fields = token_rows(LENGTHS), {"loss": "left_to_right", "gamma": 0.8, "max_steps": 3}
    trainer = tiny_trainer(tmp_path, tiny_head(target), target, rows, eval_rows=rows, **fields)
    trainer.train()
    tau = trainer.evaluate()["eval_tau"]
    trainer.save_model(str(tmp_path / "final"))
    record = json.loads((tmp_path / "final" / TRAINING_RECORD).read_text(encoding="utf8"))
    tokens = 3 * sum(n for row in LENGTHS for n in row if n > 0)
    assert (record["steps"], record["tokens"], record["objective"]["gamma"]) == (3, tokens, 0.8)
    assert "precision" not in record
    card = render_card(HeadFacts.read(tmp_path / "final"))
    assert front_matter(card)["base_model"] == "them/tiny"
    lines = ("loss | left_to_right", "steps | 3", f"hardware | {record['hardware']}", "target dtype | float32")
    for said in (*(f"| {line} |" for line in lines), "gamma 0.8", f"eval_tau {tau:.4g}"):
        assert said in card.partition("## Training")[2]

    # What a record says of folders is nobody's business.
    home = "/home/anna/secret-client"
    recipe = {"target": f"{home}/llama", "train_data": [f"{home}/mails.jsonl", "me/data"], "output_dir": f"{home}/x"}
    (tmp_path / "final" / TRAINING_RECORD).write_text(json.dumps({**record, "recipe": recipe}), encoding="utf8")
    private = HeadFacts.read(tmp_path / "final")
    assert private.training["recipe"] == {"target": "llama", "train_data": ["mails.jsonl", "me/data"]}
    assert "train_data:\n- mails.jsonl\n- me/data" in render_card(private)
    trainer.recipe = recipe
    assert training_record(trainer)["recipe"] == private.training["recipe"]

    # A record that says less gives a card that says less.
    thin = {"steps": 3, "revealed_share": 0.75}
    (tmp_path / "final" / TRAINING_RECORD).write_text(json.dumps(thin), encoding="utf8")
    told = render_card(HeadFacts.read(tmp_path / "final")).partition("## Training")[2].partition("##")[0]
    assert told.strip().splitlines() == ["| | |", "|---|---|", "| steps | 3 |", "| revealed share | 0.75 |"]


def test_the_revision_of_the_target_is_the_one_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    target = tiny_target()
    target.config.name_or_path = "them/tiny"
    assert tiny_head(target).config.target_revision is None
    snapshots = tmp_path / "models--them--tiny" / "snapshots"
    (snapshots / ("a" * 40)).mkdir(parents=True)
    head = tiny_head(target)
    assert head.config.target_revision == "a" * 40
    head.save_pretrained(tmp_path / "head")
    assert f"at revision `{'a' * 40}`" in render_card(HeadFacts.read(tmp_path / "head"))
    (snapshots / ("b" * 40)).mkdir()  # which of the two, nobody can tell
    assert tiny_head(target).config.target_revision is None
    refs = tmp_path / "models--them--tiny" / "refs"
    refs.mkdir()
    (refs / "v1").write_text("b" * 40)
    assert cached_commit("them/tiny", "v1") == "b" * 40
    assert cached_commit("them/tiny", "c" * 40) == "c" * 40
    assert cached_commit("them/tiny", "v2") is None
    assert cached_commit(str(tmp_path), "v1") is None


def test_options_are_told(tmp_path: Path) -> None:
    told: dict[str, tuple[Any, dict[str, Any]]] = {
        "| options | double_norm True |": (tiny_head, {"double_norm": True}),
        "| options | mask_mode peagle, mask_token_id 9 |": (tiny_head, {"mask_mode": "peagle", "mask_token_id": 9}),
        "| options | draft_vocab_size 3 |": (tiny_head, {"draft_vocabulary": [4, 5, 6]}),
        "| chat template | `0a`, thinking off |": (tiny_head, {"chat_template_hash": "0a", "enable_thinking": False}),
        "| drafts | 5 tokens |": (tiny_eagle_drafter, {"beam": 1}),
        "| options | beam 3 |": (tiny_eagle_drafter, {"beam": 3}),
        ", unmasking left_to_right |": (tiny_diffusion_drafter, {"unmasking": "left_to_right"}),
        "| reads | layers 0, 2 of the target's 2 |": (tiny_diffusion_drafter, {"feature_layers": [0, 2]}),
        "its tokens' table included": (tiny_head, {"embeddings": "own"}),
    }
    for said, (make, fields) in told.items():
        make(tiny_target() if make is tiny_head else llama_target("llama"), **fields).save_pretrained(tmp_path)
        card = render_card(HeadFacts.read(tmp_path))
        assert said in card
        assert "eprint = {" in card
        assert ("embeddings and LM head are the target's" in card) == ("embeddings" not in fields)
        assert "A model with other widths, layers or vocabulary is refused" in card


def test_what_people_wrote_stays() -> None:
    card = render_card(facts(license="mit", base_model="them/old"))
    mine = card.replace("license: mit", "license: mit\nthumbnail: mine.png\nlanguage: en")
    mine = mine.replace("pipeline_tag: text-generation", "pipeline_tag: text2text-generation")
    mine = mine.replace("- draft-model", "- draft-model\n- mine").replace("# A DART head", "# My head\n\nAbove.")
    mine = mine.replace("selector_rank 128", "selector_rank 7") + "\nBelow, é.\r\n"
    again = render_card(facts(base_model="them/new"), mine)
    matter = front_matter(again)
    kept = {"license": "mit", "thumbnail": "mine.png", "language": "en", "pipeline_tag": "text2text-generation"}
    assert {"base_model": "them/new", **kept}.items() <= matter.items()
    assert {"mine", "custom_generate"} <= {*matter["tags"]}
    above, written, below = again.split(BEGIN)[0], again.split(BEGIN)[1].split(END)[0], again.split(END)[1]
    assert "# My head\n\nAbove.\n" in above
    assert "selector_rank 128" in written
    assert below.endswith("\nBelow, é.\r\n")
    assert ModelCard(again).data.license == "mit"
    for card in ("# Mine", f"{END}\n{BEGIN}", "---\nlicense: mit\n---\nMine, too\n"):  # without markers
        assert render_card(facts(), card) == card
    with pytest.raises(ValueError, match="front matter of the card is not valid YAML"):
        render_card(facts(), f"---\nlicense: [\n---\n{BEGIN}\n{END}\n")


def test_unusable_files_get_one_sentence(tmp_path: Path) -> None:
    for name, content, says in (
        ("config.json", None, "no config.json of a DART head"),
        ("config.json", (PACKAGED_TARGET / "config.json").read_bytes(), "no config.json of a DART head"),
        ("config.json", b"{", "config.json cannot be read"),
        ("model.safetensors", None, "no weights"),
        ("model.safetensors", b"\x07" * 99, "truncated or damaged"),
        ("training.json", b"[]", "training.json cannot be read"),
    ):
        file = shutil.copytree(PACKAGED_HEAD, tmp_path / "head", dirs_exist_ok=True) / name
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        refused(lambda: HeadFacts.read(tmp_path / "head"), ValueError, says)
    refused(lambda: facts(bench=tmp_path / "none.json"), ValueError, r"none.json cannot be read")
    refused(lambda: facts(bench=PACKAGED_HEAD / "config.json"), ValueError, "not what hf-dart bench --json writes")
    tiny_head(tiny_target()).save_pretrained(tmp_path)
    refused(lambda: HeadFacts.read(tmp_path, bench=BENCH), ValueError, "this head has .*; give its own bench")
