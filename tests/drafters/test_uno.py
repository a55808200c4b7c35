"""Self-drafting LoRA: exact like every drafter, drafted as it is trained, and nothing of it on the target."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from support import tiny_training
from support.attacks import changed, damaged, seeds, survives
from support.cases import GREEDY, SAMPLED, batch
from support.compare import assert_identical, run, tally
from support.interruptions import interrupt
from support.letters import letters
from support.sentences import one_sentence
from support.tiny import VOCABULARY, prompts, tiny_target, tiny_uno_drafter
from transformers import DynamicCache

import hf_dart
from hf_dart import DartCandidateGenerator, TreeConfig, UnoDrafter, attach, load_drafter
from hf_dart.cli import main
from hf_dart.training import UnoTrainer

EXACT = tally("float64, self-drafting LoRA")
TREES = [(4, TreeConfig.chain(5)), (1, TreeConfig(nodes=20, depth=3)), (2, TreeConfig())]


@pytest.fixture(scope="module")
def llama() -> tuple[Any, UnoDrafter]:
    target = tiny_target("llama")
    return target, tiny_uno_drafter(target)


@pytest.mark.parametrize(("size", "tree"), TREES)
def test_every_tree(llama: tuple[Any, UnoDrafter], size: int, tree: TreeConfig) -> None:
    for mode in (GREEDY, SAMPLED):
        assert_identical(*llama, batch(size, "sdpa"), **mode, tree_config=tree, into=EXACT)
        stats = llama[1].last_stats
        assert stats is not None
        if tree.nodes is not None:  # the first token of each draft is the target's own
            assert all(min(counts) != 1 for counts in stats.committed[:-1])


# ---- what is drafted ----------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # of PEFT's own model
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_draft_is_what_peft_says_of_a_masked_block(family: str, tmp_path: Path) -> None:
    """The text and its last token read without the adapter, then masks with it, by PEFT; and what is trained."""
    target = tiny_target(family)
    drafter = tiny_uno_drafter(target, draft_length=4)
    drafts: list[torch.Tensor] = []

    class Watched(UnoDrafter):
        def propose(self, *args: Any, **kwargs: Any) -> Any:
            found = super().propose(*args, **kwargs)
            drafts.append(found.logits)
            return found

    drafter.__class__ = Watched
    inputs = prompts([12])
    tokens = run(target, inputs, 0, **GREEDY, assistant=drafter, tree_config=TreeConfig(nodes=8)).sequences
    drafter.__class__ = UnoDrafter
    drafter.save_pretrained(tmp_path)
    theirs = PeftModel.from_pretrained(copy.deepcopy(target), str(tmp_path)).eval()
    cache = DynamicCache()
    with theirs.disable_adapter():
        first = theirs(tokens[:, :13], past_key_values=cache).logits[:, -1:]
    masks = tokens.new_full((1, 3), VOCABULARY - 1)
    expected = torch.cat([first, theirs(masks, past_key_values=copy.deepcopy(cache)).logits], dim=1)
    assert torch.allclose(expected, drafts[0], atol=1e-9)
    assert not torch.allclose(target(masks, past_key_values=cache).logits, drafts[0][:, 1:], atol=1e-2), "LoRA matters"
    # The same place as a block of training.
    rows = [{"input_ids": tokens[0], "documents": torch.zeros_like(tokens[0])}]
    trainer = tiny_training.tiny_trainer(tmp_path / "run", drafter, target, rows, kind=UnoTrainer)
    states = {"input_ids": tokens, "documents": torch.zeros_like(tokens), "anchors": torch.tensor([[3, 11, -1]])}
    features, logits = trainer.teach(tokens, states["documents"])
    hidden = trainer.block_states(drafter, states, features, logits)
    assert torch.allclose(drafter.logits(hidden[0, 1]), drafts[0][0], atol=1e-9)


@torch.no_grad()
def test_documents_of_a_row_do_not_see_each_other(tmp_path: Path, llama: tuple[Any, UnoDrafter]) -> None:
    target, drafter = llama
    ids = prompts([20])["input_ids"]
    documents = torch.tensor([[0] * 8 + [1] * 12])
    trainer = tiny_training.tiny_trainer(tmp_path, drafter, target, [], kind=UnoTrainer)
    found = []
    for row, where, anchor in ((ids, documents, 12), (ids[:, 8:], documents[:, 8:], 4)):
        inputs = {"input_ids": row, "documents": where, "anchors": torch.tensor([[anchor]])}
        features, logits = trainer.teach(row, where)
        assert torch.allclose(logits[:, -12:], target(ids[:, 8:]).logits, atol=1e-9)
        found.append(trainer.block_states(drafter, inputs, features, logits))
    assert torch.allclose(*found, atol=1e-9)


# ---- the target ---------------------------------------------------------------------------------------------


def test_nothing_of_it_is_on_the_target(llama: tuple[Any, UnoDrafter]) -> None:
    """Nor after a call that breaks off in the draft, or in another thread meanwhile."""
    target = attach(tiny_target("llama"))
    modules, before = [type(module) for module in target.modules()], copy.deepcopy(target.state_dict())
    flags = [weight.requires_grad for weight in target.parameters()]
    drafter = tiny_uno_drafter(target)
    assert all(flags)
    assert [weight.requires_grad for weight in target.parameters()] == flags
    assert sum(weight.numel() for weight in drafter.parameters()) < 5000, "the twin's weights are the target's own"
    inputs, options = prompts([9, 3]), {**GREEDY, "tree_config": TreeConfig(nodes=8)}
    stock = run(target, inputs, 0, **GREEDY).sequences
    inside, outside = threading.Event(), threading.Event()
    meanwhile: list[torch.Tensor] = []

    def stop(*args: Any) -> None:
        inside.set()
        outside.wait(20)
        raise KeyboardInterrupt

    def other() -> None:
        inside.wait(20)
        meanwhile.append(run(target, inputs, 0, **GREEDY).sequences)
        outside.set()

    thread = threading.Thread(target=other)
    thread.start()
    layer = drafter.twin.get_decoder().layers[-1]
    hook = layer.register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        run(target, inputs, 0, **options, assistant=drafter)
    thread.join()
    hook.remove()
    assert torch.equal(meanwhile[0], stock)
    assert [type(module) for module in target.modules()] == modules
    assert all(torch.equal(before[name], weight) for name, weight in target.state_dict().items())
    assert_identical(target, drafter, inputs, **options, into=EXACT)
    with torch.no_grad():  # what the target learns, its twin knows
        target.get_decoder().layers[0].mlp.up_proj.weight.mul_(1.5)
    assert drafter.twin.get_decoder().layers[0].mlp.up_proj.base_layer.weight is not None
    assert_identical(target, drafter, inputs, **options, into=EXACT)


@pytest.mark.parametrize("sampled", [False, True])
def test_interrupted_anywhere(sampled: bool) -> None:
    """Also in the middle of a draft, of which the target's cache shows nothing."""
    reached = interrupt("llama", "dynamic", [9, 3], sampled, 8, 3, tiny_uno_drafter, replayed=False)
    assert max(reached) > 3


# ---- training and files -------------------------------------------------------------------------------------


def test_training_teaches_it_to_draft(tmp_path: Path) -> None:
    """On the adapter alone; a run resumes, and what it saves is a few kilobytes that PEFT reads."""
    target = tiny_training.tiny_target()
    before = copy.deepcopy(target.state_dict())
    rows = tiny_training.token_rows(tiny_training.LENGTHS)
    drafter = UnoDrafter.from_target(target, mask_token_id=1, draft_length=4, rank=16)
    options = {"max_steps": 30, "save_strategy": "steps", "save_steps": 20, "kind": UnoTrainer}
    trainer = tiny_training.tiny_trainer(tmp_path / "run", drafter, target, rows, rows, **options)
    first = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < 0.8 * first["eval_loss"]
    assert after["eval_tau_sampled"] > first["eval_tau_sampled"]
    assert all(torch.equal(before[name], weight) for name, weight in target.state_dict().items())
    trainer.save_model(str(tmp_path / "final"))
    files = {file.name for file in (tmp_path / "final").iterdir()}
    assert {"config.json", "adapter_config.json", "adapter_model.safetensors", "training.json"} <= files
    assert "model.safetensors" not in files
    loaded = load_drafter(str(tmp_path / "final"), target=target)
    assert isinstance(loaded, UnoDrafter)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), loaded.parameters(), strict=True))
    inputs = {"input_ids": rows[1]["input_ids"][None, :8]}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    assert_identical(target, loaded, inputs, do_sample=False, max_new_tokens=12, tree_config=TreeConfig(nodes=8))
    resumed = UnoDrafter.from_target(target, mask_token_id=1, draft_length=4, rank=16)
    again = tiny_training.tiny_trainer(tmp_path / "run", resumed, target, rows, rows, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-20"))
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), resumed.parameters(), strict=True))


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny_target("llama", dtype=torch.float32)
    target.save_pretrained(tmp_path / "target")
    letters("".join(map(chr, range(97, 97 + 40)))).save_pretrained(tmp_path / "target")
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 200)
    words = ["train", "--drafter", "uno", "--target", str(tmp_path / "target"), "--train_data", str(text)]
    words += ["--output_dir", str(tmp_path / "run"), "--max_steps", "2", "--max_length", "33", "--use_cpu", "True"]
    assert main([*words, "--report_to", "none", "--draft_length", "4", "--rank", "4"]) == 0
    head = str(tmp_path / "run" / "final")
    given = ["--target", str(tmp_path / "target"), "--head", head]
    assert main(["generate", *given, "abcabc", "--max-new-tokens", "8"]) == 0
    assert main(["audit", *given, "--new-tokens", "8", "abcdabc"]) == 0
    assert main(["view", *given, "abcabc", "--max-new-tokens", "8", "--output", str(tmp_path / "page.html")]) == 0
    assert main(["push", head, "me/uno", "--dry-run", str(tmp_path / "pushed")]) == 0
    card = (tmp_path / "pushed" / "README.md").read_text()
    assert "the target's own, with LoRA of rank 4" in card
    assert (tmp_path / "pushed" / "adapter_model.safetensors").is_file()
    capsys.readouterr()


def test_what_is_refused(llama: tuple[Any, UnoDrafter], tmp_path: Path) -> None:
    target, drafter = llama
    with pytest.raises(ValueError, match="give tokenizer= or mask_token_id=") as error:
        UnoDrafter.from_target(target)
    one_sentence(error)
    for wrong in ({"rank": 0}, {"alpha": 0.0}, {"mask_token_id": VOCABULARY}, {"feature_layers": [1]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            tiny_uno_drafter(target, **wrong)
    with pytest.raises(ValueError, match="no linear module 'wq'") as error:
        tiny_uno_drafter(target, target_modules=["wq"])
    one_sentence(error)
    with pytest.raises(ValueError, match="no linear module 'q_proj'"):
        tiny_uno_drafter(tiny_target("gpt2"))
    with pytest.raises(ValueError, match="not lent here") as error:
        run(target, prompts([5]), 0, **GREEDY, custom_generate=DartCandidateGenerator.stock_loop(drafter))
    one_sentence(error)
    with pytest.raises(ValueError, match="call generate without") as error:
        hf_dart.compile(target, drafter, backend=None)
    one_sentence(error)
    drafter.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pass target=model"):
        load_drafter(str(tmp_path))
    with pytest.raises(ValueError, match="made for"):
        load_drafter(str(tmp_path), target=tiny_target("llama", num_hidden_layers=3))
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match="holds no adapter_config"):
        load_drafter(str(tmp_path), target=target)
    with pytest.raises(ValueError, match="merge it into the model first"):
        tiny_uno_drafter(drafter.twin)
    assert_identical(target, drafter, prompts([3]), **GREEDY, into=EXACT)


def test_adapters_of_other_projects(llama: tuple[Any, UnoDrafter], tmp_path: Path) -> None:
    """They lie beside no config.json of ours."""
    LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="read as `hf-dart train --drafter uno` writes them") as error:
        load_drafter(str(tmp_path), target=llama[0])
    one_sentence(error)


@pytest.mark.parametrize("part", seeds(12, 600))
@pytest.mark.parametrize("file", ["config.json", "adapter_config.json", "adapter_model.safetensors"])
def test_damaged_files(llama: tuple[Any, UnoDrafter], tmp_path: Path, file: str, part: range) -> None:
    target, drafter = llama
    drafter.save_pretrained(tmp_path)
    whole = (tmp_path / file).read_bytes()
    read = 0
    for seed in part:
        if file.endswith(".json"):
            (tmp_path / file).write_text(changed(json.loads(whole), seed), encoding="latin1")
        else:
            (tmp_path / file).write_bytes(damaged(whole, seed))
        read += survives(lambda: load_drafter(str(tmp_path), target=target))
    assert read < len(part)
    (tmp_path / file).write_bytes(whole)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    name = next(iter(weights))
    for content in ({**weights, name: weights[name][:, :1].contiguous()}, dict(list(weights.items())[1:])):
        save_file(content, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match="does not fit") as error:
            load_drafter(str(tmp_path), target=target)
        one_sentence(error)


def test_the_runs_accepted_drafts() -> None:
    if not EXACT.taus:
        pytest.skip("none of the runs that this test adds up was selected")
    assert EXACT.mean_tau > 1.3
