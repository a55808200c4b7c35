"""The command line on the packaged pair: what users see, and one sentence for what they get wrong."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.chats import THINKING, chat_tokenizer
from support.eagle3 import eagle3_config
from support.relatives import relative_config
from support.sentences import assert_command_says, refused
from support.tiny import tiny_target
from support.tiny_training import largest_file
from transformers import LlamaConfig, Qwen3Config, Qwen3NextConfig, T5Config

from hf_dart.bench import examining, profiling, speed
from hf_dart.bench.exact import Difference, Run, differences
from hf_dart.bench.pair import load_pair
from hf_dart.cli import demo_learning, main
from hf_dart.cli.common import check_file, loading_options, placing_options, write_json
from hf_dart.cli.demo import demo
from hf_dart.errors import UserError
from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET

PROMPT = "import os\n\n\ndef join(left, right):\n    "
MEASURE = [["bench"], ["audit"]]
TARGET, HEAD = str(PACKAGED_TARGET), str(PACKAGED_HEAD)


def test_demo_shows_that_nothing_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--new-tokens", "24"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("\nidentical: yes\n")
    assert re.search(r"greedy +hf_dart +\d+ +\d\.\d\d ", shown)
    assert "\033" not in shown


def test_demo_in_colour_with_a_false_head(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong token: the verdict has to notice."""

    def wrong(stock: Run, *others: Run) -> list[list[Difference | None]]:
        (drafted,) = others
        sequences = drafted.sequences.clone()
        sequences[0, -3] += 1
        return differences(stock, replace(drafted, sequences=sequences))

    monkeypatch.setattr("hf_dart.bench.speed.differences", wrong)
    assert not demo(load_pair(), new_tokens=8, prompts=(PROMPT,), color=True)
    *lines, last = capsys.readouterr().out.splitlines()
    assert any("\033[32m" in line for line in lines)  # accepted drafts
    assert "identical: no" in last


@pytest.mark.parametrize("options", [["--temperature", "0"], ["--temperature", "0.9", "--seed", "7"]])
def test_generate_streams_what_stock_streams(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", PROMPT, "--max-new-tokens", "24", *options]
    assert main([*words, "--stats"]) == 0
    drafted = capsys.readouterr()
    assert main([*words, "--stock"]) == 0
    stock = capsys.readouterr()
    assert drafted.out == stock.out
    assert len(drafted.out) > 24
    assert re.search(r"\d tokens/s; \d+ tokens in \d+ rounds, tau \d", drafted.err)
    assert not stock.err
    assert main([*words, "--stock", "--stats"]) == 0
    assert re.fullmatch(r"\d+\.\d tokens/s\n", capsys.readouterr().err)


def test_generate_of_targets_that_stop_at_strings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And whose tokenizer makes no mask."""
    shutil.copytree(TARGET, tmp_path / "target")
    for name, more in (
        ("generation_config.json", {"stop_strings": ["("]}),
        ("tokenizer_config.json", {"model_input_names": ["input_ids"]}),
    ):
        file = tmp_path / "target" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
    words = ["generate", PROMPT, "--target", str(tmp_path / "target"), "--dtype", "float32", "--temperature", "0"]
    assert main([*words, "--head", HEAD]) == 0
    drafted = capsys.readouterr().out
    assert main([*words, "--stock"]) == 0
    assert capsys.readouterr().out == drafted
    assert drafted.rstrip("\n").endswith("(")
    pair = load_pair(str(tmp_path / "target"), HEAD, "float32")
    prompt = pair.tokenizer(PROMPT)["input_ids"]
    assert pair.tokenizer.decode(speed.answer(pair, prompt, 24)).endswith("(")
    (stock,) = speed.measure(pair, [prompt], speed.Settings(1, repeats=1), {}, {"greedy": speed.MODES["greedy"]})
    assert pair.tokenizer.decode(stock.written[0]).endswith("(")
    assert profiling.measure(pair, context=6, rounds=2, repeats=1, sizes=(1, 4)).token_ms >= 0
    assert examining._of_threads(pair, [prompt], 4) or examining._cores() == 1


def test_generate_thinks_as_the_head_was_trained_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, head = tmp_path / "target", tmp_path / "head"
    shutil.copytree(TARGET, target)
    shutil.copytree(HEAD, head)
    tokenizer = chat_tokenizer(THINKING)
    tokenizer.save_pretrained(target)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"enable_thinking": False}))
    common = ["--target", str(target), "--head", str(head), "--dtype", "float32", "--max-new-tokens", "8"]
    shown = []
    for flags in ([], ["--no-thinking"], ["--thinking"]):
        assert main(["generate", "add", "--chat", *common, *flags]) == 0
        shown.append(capsys.readouterr().out)
    for thinking in (False, True):
        turn = [{"role": "user", "content": "add"}]
        prompt = tokenizer.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        assert main(["generate", prompt, "--stock", *common]) == 0
        assert capsys.readouterr().out == shown[1 + thinking]
    assert shown[0] == shown[1] != shown[2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["generate", "x", "--target", TARGET, "--head", "./nowhere"], "no folder './nowhere'"),
        (["generate", "x", "--target", "./nowhere", "--head", HEAD], "no folder './nowhere'"),
        (["generate", "x", "--target", TARGET, "--head", "nobody/nothing"], "Cannot load the head"),
        (["generate", "x", "--target", TARGET, "--head", str(PACKAGED_HEAD.parent)], "holds no config.json"),
        (["generate", "x", "--target", HEAD, "--head", HEAD], "Cannot load the target"),
        (["generate", "x", "--device-map", "nowhere"], "Cannot load the target"),
        (["generate", "", "--max-new-tokens", "4"], "prompt is empty"),
        (["generate", "x", "--chat", "--device-map", "nowhere"], "no chat template"),  # before the model is loaded
        (["view", "x", "--chat", "--device-map", "nowhere"], "no chat template"),
        (["generate", "x", "--head", "nobody"], "an id of the Hub names its user; give USER/nobody."),
        (["train", "nothing.yaml"], "There is no recipe 'nothing.yaml'; name a YAML or JSON file"),
        (["generate", "x", "--no-thinking"], "add --chat"),
        (["audit", ""], "prompt is empty"),
        (["bench", "--text", "./nowhere.py"], "Cannot read"),
        (["bench", "--smoke", "--suite", "no/such/file.jsonl"], "Cannot read the suite"),
        (["bench", "--smoke", "--assistant-model", HEAD], "Cannot load the assistant model"),
        (["bench", "--prompts", "2", "--batch", "1,4"], "--batch takes sizes"),
        (["bench", "--json", "./nowhere/bench.json"], "No such file or directory"),
        *(([*words, "--json", HEAD], "Is a directory") for words in MEASURE),
        (["view", "x", "--output", HEAD], "Is a directory"),
        (["regenerate", "data.txt", "--output", f"{HEAD}/config.json"], "Not a directory"),
        (["regenerate", "data.txt", "--output", "x" * 300], "File name too long"),
        (["bench", "--json", "x" * 300], "File name too long"),
    ],
)
def test_mistakes_get_one_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_command_says(words, says, capsys)


def test_what_cannot_be_written_is_said_before_a_run_and_behind_it(tmp_path: Path) -> None:
    refused(lambda: write_json(tmp_path, {"tau": 3.0}), UserError, r"Cannot write .* a directory.*; make room there")
    check_file(tmp_path / "new.json")
    assert not list(tmp_path.iterdir())


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A link and a device are written to, and stay what they are."""
    file, link = tmp_path / "report.json", tmp_path / "link.json"
    for tau in (3.0, 4.0):
        write_json(file, {"tau": tau})
        with largest_file(30):
            refused(lambda: write_json(file, {"tau": [5.0] * 9}), UserError, "File too large.*; make room there")
        assert json.loads(file.read_text()) == {"tau": tau}
    link.symlink_to(file)
    write_json(link, {"tau": 5.0})
    assert (link.is_symlink(), json.loads(file.read_text())) == (True, {"tau": 5.0})
    reads, writes = os.pipe()
    write_json(Path(f"/dev/fd/{writes}"), {"tau": 3.0})
    assert json.loads(os.read(reads, 99)) == {"tau": 3.0}


@pytest.mark.parametrize(
    "line",
    [
        "", "generate", "generate x --temperature -1", "generate x --temperature 1e-320",
        "generate x --temperature nan", "generate x --seed -99999999999999999999", "demo --new-tokens 0",
        "bench --batch one", "bench --rivals eagles", "generate x --quantization {load_in_4bit}",
        "generate x --quantization [4]", "regenerate x --output y --minutes 0", "serve --port 65536",
    ],
)  # fmt: skip
def test_unusable_options_exit_with_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 2
    assert "hf-dart" in capsys.readouterr().err


def test_a_target_without_a_tokenizer_is_told_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((PACKAGED_TARGET / name).read_bytes())
    assert_command_says(["generate", "x", "--target", str(tmp_path), "--head", HEAD], "holds no tokenizer", capsys)


def test_a_target_goes_to_the_gpu_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the command line says where."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for words, place in ([], {"": 1}), (["--device-map", "cpu"], "cpu"):
        given = placing_options().parse_args(words)
        assert loading_options(given)["device_map"] == place


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, hf_dart.cli; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_reader_who_closes_the_pipe_hears_nothing() -> None:
    """Of output so short that it is written at the end."""
    read, write = os.pipe()
    os.close(read)
    code = "import sys, hf_dart.cli; sys.exit(hf_dart.cli.main(['info', 'packaged']))"
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, env=buffered, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_info(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "packaged"]) == 0
    told = capsys.readouterr().out
    assert "qwen3, 8 layers of 256, 6144 tokens\nfits: " in told
    assert "by architecture and sizes" not in told
    assert "best first:\n  packaged (model_cards/demo_pair)\n" in told
    assert "of its own: " not in told
    Qwen3NextConfig().save_pretrained(tmp_path / "qwen")
    assert main(["info", str(tmp_path / "qwen")]) == 0
    assert "of its own: a multi-token prediction module" in capsys.readouterr().out
    LlamaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=100).save_pretrained(tmp_path / "llama")
    assert main(["info", str(tmp_path / "llama")]) == 0
    told = capsys.readouterr().out
    assert "published: nothing that is known here" in told
    assert f"hf-dart train --target {tmp_path / 'llama'} --train_data" in told
    assert main(["info", str(PACKAGED_HEAD)]) == 0
    assert f"{PACKAGED_HEAD}: a DART head for py8m\n" in capsys.readouterr().out
    sizes = {"hidden_size": 2560, "num_hidden_layers": 36, "vocab_size": 151936}
    Qwen3Config(**sizes).save_pretrained(tmp_path / "qwen3-4b")
    assert main(["info", f"{tmp_path / 'qwen3-4b'}/"]) == 0
    assert "published for Qwen/Qwen3-4B (as of 20" in (told := capsys.readouterr().out)
    assert "by architecture and sizes" not in told
    target = tiny_target("llama", num_hidden_layers=8)
    for config, called in (
        (eagle3_config(target), "an EAGLE-3 head in the original format"),
        (relative_config(target, "DFlash2"), "a DFlash2 drafter in z-lab's format"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["info", str(tmp_path)]) == 0
        assert f"{called}\nload it: load_drafter(" in capsys.readouterr().out
    T5Config(num_layers=2).save_pretrained(tmp_path)
    for folder, says in ((tmp_path, "is a t5, no causal language"), (tmp_path / "none", "Cannot read the config")):
        assert_command_says(["info", str(folder)], says, capsys)


@pytest.mark.parametrize("command", ["bench", "bench serve", "ngram build table"])
def test_rows_of_a_data_set_are_no_plain_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where all of a file is read, the names of its fields would be, too."""
    with pytest.raises(SystemExit):
        main([*command.split(), "--text", "rows.jsonl"])
    assert "rows.jsonl is not plain text; `bench --suite` and `ngram build --dataset`" in capsys.readouterr().err


@pytest.mark.matrix
def test_the_demo_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_learning, "_TUNING", 3.0)
    monkeypatch.setattr(demo_learning, "_SERVING", 12.0)
    lines: list[str] = []
    assert demo_learning.demo(load_pair(), lines.append)
    first, tuned, last = (float(line.split(": ")[-1]) for line in lines if line.startswith(("tau of", "tau on")))
    assert tuned < first
    assert last > tuned
    assert lines[-1].startswith("identical: yes")


def test_fine_tuning_changes_the_weights_alone() -> None:
    pair = load_pair()
    before, state = copy.deepcopy(pair.model.state_dict()), torch.get_rng_state()
    demo_learning.fine_tune(pair.model, [[number + place for place in range(16)] for number in range(16)], 0.2)
    assert torch.equal(torch.get_rng_state(), state)
    after = pair.model.state_dict()
    same = {name.split(".")[-2]: torch.equal(weight, after.pop(name)) for name, weight in before.items()}
    assert not after
    assert (same["lm_head"], same["up_proj"]) == (True, False)
