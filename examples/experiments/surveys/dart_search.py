"""`TreeConfig.paper()` held against the search of DART's own code (arXiv 2601.19278), compiled from a checkout of it.

    PYTHONPATH=tests python examples/experiments/surveys/dart_search.py CHECKOUT  # of fvliang/DART; needs g++

Both get the packaged head's drafts after many beginnings of a text, and the n-grams of another text. Prints how many
trees are the same; exits with 1 unless all are. With `--record FILE` the first cases are kept there, for
`tests/trees/test_growers.py`, which needs neither.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.tiny import tiny_head, tiny_target
from support.trees import paths
from torch import Tensor
from transformers import LogitsProcessorList

from hf_dart import TreeConfig
from hf_dart.decoding.grow import TreeGrower
from hf_dart.drafters.base import Proposal
from hf_dart.trees.ngram.build import build

CASES, RECORDED, CORPUS = 200, 16, 6000
SOURCES = ("cpp_search/searcher.cpp", "cpp_ngram/trie_ngram.cpp", "cpp_utils/buffered_file_reader.cpp")
# Its own flags (cpp_search.py) and weights (tree_search_config.py); its trie_ngram.cpp has a main of its own.
FLAGS = ("-O3", "-std=c++20", "-fopenmp", "-DNO_NGRAM_ON_FIRST_TOKEN", "-DNGRAM_BATCH_LOAD")
DRIVER = """
#include <cmath>
#include <iostream>
#include "inc/searcher.h"

int main() {
  size_t length, cases, context, depth, width;
  int end;
  std::cin >> length >> cases >> context >> depth >> width >> end;
  auto numbers = [](auto &into) { for (auto &one : into) std::cin >> one; };
  std::vector<token_t> corpus(length), prompt(context);
  numbers(corpus);
  ngram::TrieNgram table(3);
  table.add_conversation(corpus);
  searcher::Searcher search([](size_t i) { return std::pow(i + 1, -0.7); }, [](size_t i) { return std::pow(0.9, i); },
                            0.5, end, 20, 59);
  for (size_t number = 0; number < cases; ++number) {
    std::vector<std::vector<token_t>> tokens(depth, std::vector<token_t>(width));
    std::vector<std::vector<prob_t>> shares(depth, std::vector<prob_t>(width));
    numbers(prompt);
    for (auto &level : tokens) numbers(level);
    for (auto &level : shares) numbers(level);
    auto [drafted, leaves, mask, positions] = search.search(depth, tokens, shares, table, prompt);
    for (size_t node = 1; node < drafted.size(); ++node) {
      for (size_t at = 1; at <= positions[node]; ++at)
        for (size_t above = 1; above < drafted.size(); ++above)
          if (mask[node][above] && positions[above] == at) std::cout << drafted[above] << ' ';
      std::cout << ';';
    }
    std::cout << std::endl;
  }
}
"""


@torch.no_grad()
def make_cases() -> Cases:
    from hf_dart.bench.pair import load_pair
    from hf_dart.hub.loading import PACKAGED_HEAD, PACKAGED_TARGET
    from hf_dart.models.verify import features_request, gather_features

    pair = load_pair(str(PACKAGED_TARGET), str(PACKAGED_HEAD), "float32")
    folder = Path(__file__).parents[3] / "hf_dart" / "decoding"
    text, corpus = (
        pair.tokenizer((folder / name).read_text(), return_tensors="pt")["input_ids"]
        for name in ("walk.py", "candidate_generator.py")
    )
    text = text[:, : CASES + 40]
    states = pair.model(text, **features_request(pair.head.feature_layers))
    features = gather_features(states, pair.head.feature_layers, text)
    rows = []
    for end in range(40, 40 + CASES):
        state = pair.head.begin(1, end)
        rows.append(pair.head.propose(state, features[:, :end], text[:, 1 : end + 1], torch.tensor([end])).logits[0])
    best, columns = torch.stack(rows).topk(25)
    vocabulary = pair.head.draft_vocabulary
    tokens = columns if vocabulary is None else vocabulary[columns]
    end = int(pair.tokenizer.eos_token_id)
    # Every other text is likely to end at every depth.
    for number in range(0, CASES, 2):
        for depth in tokens[number]:
            place = number % 8 // 2
            depth[depth == end] = depth[place].clone()
            depth[place] = end
    corpus[0, ::20] = end
    context = torch.stack([text[0, number + 39 : number + 41] for number in range(CASES)])
    return Cases(corpus[0, :CORPUS], context, tokens, best, end)


Tree = set[tuple[int, ...]]
NODES = 59  # of such a tree


@dataclass(frozen=True)
class Cases:
    """C drafts of d depths with K candidates each.

    Attributes:
        corpus: [T] tokens whose trigrams are counted.
        context: [C, 2] the last tokens before each draft.
        tokens, logits: [C, d, K] the best candidates.
        end: the token that ends a text.
    """

    corpus: Tensor
    context: Tensor
    tokens: Tensor
    logits: Tensor
    end: int

    @staticmethod
    def load(path: Path) -> tuple[Cases, list[Tree]]:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        whole = {name: found[name].long() for name in ("corpus", "context", "tokens")}
        cases = Cases(**whole, logits=found["logits"], end=int(found["end"]))
        wanted = [{tuple(x for x in path if x >= 0) for path in tree} for tree in found["trees"].tolist()]
        return cases, wanted


def trees(cases: Cases, folder: Path) -> list[Tree]:
    """What `TreeConfig.paper()` grows of them."""
    vocabulary = 1 + int(max(part.max() for part in (cases.corpus, cases.context, cases.tokens)))
    head = tiny_head(tiny_target("llama", vocab_size=vocabulary), draft_length=cases.tokens.shape[1])
    head.ngram = build([cases.corpus.tolist()], folder / "ngrams", vocab_size=vocabulary)
    found = []
    for context, tokens, logits in zip(cases.context.tolist(), cases.tokens, cases.logits, strict=True):
        spread = torch.full((1, len(tokens), vocabulary), -inf).scatter(2, tokens[None], logits[None])
        none, cpu = LogitsProcessorList(), torch.device("cpu")
        grower = TreeGrower(head, TreeConfig.paper(), none, [context], cpu, {cases.end})
        found.append(paths(grower(Proposal(spread, spread), None, [len(tokens) + 1]), 0))
    return found


def theirs(checkout: Path, cases: Cases) -> list[set[tuple[int, ...]]]:
    """The paths of the tree of each case, as DART's search finds them."""
    root = checkout / "dart" / "tree_search" / "cpplib"
    with TemporaryDirectory() as folder:
        driver, objects = Path(folder) / "driver.cpp", []
        driver.write_text(DRIVER)
        for source in (driver, *(root / name for name in SOURCES)):
            objects.append(str(Path(folder) / f"{source.stem}.o"))
            renamed = () if source == driver else ("-Dmain=its_own_main",)
            subprocess.run(["g++", *FLAGS, *renamed, f"-I{root}", "-c", str(source), "-o", objects[-1]], check=True)
        program = str(Path(folder) / "search")
        subprocess.run(["g++", "-fopenmp", *objects, "-o", program], check=True)
        count, depth, width = cases.tokens.shape
        words = [len(cases.corpus), count, cases.context.shape[1], depth, width, cases.end, *cases.corpus.tolist()]
        for number in range(count):
            words += cases.context[number].tolist() + cases.tokens[number].flatten().tolist()
            words += cases.logits[number].softmax(-1).flatten().tolist()
        given = " ".join(map(str, words))
        printed = subprocess.run([program], input=given, text=True, capture_output=True, check=True).stdout
    lines = printed.splitlines()
    return [{tuple(map(int, path.split())) for path in line.split(";") if path} for line in lines]


def record(cases: Cases, wanted: list[Tree], path: Path) -> None:
    """Write the first cases, with the tree of each as paths of 8 tokens filled up with -1; tokens lie below 2^15."""
    filled = [[[*path, *[-1] * (8 - len(path))] for path in sorted(tree)] for tree in wanted[:RECORDED]]
    tensors = {"corpus": cases.corpus, "end": torch.tensor(cases.end), "trees": torch.tensor(filled)}
    tensors |= {"context": cases.context[:RECORDED], "tokens": cases.tokens[:RECORDED]}
    saved = {name: tensor.short().contiguous() for name, tensor in tensors.items()}
    save_file({**saved, "logits": cases.logits[:RECORDED].contiguous()}, path)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    cases = make_cases()
    wanted = theirs(arguments.checkout, cases)
    with TemporaryDirectory() as folder:
        found = trees(cases, Path(folder))
    same = sum(one == other for one, other in zip(found, wanted, strict=True))
    print(f"{same} of {len(wanted)} trees are the same")
    if arguments.record is not None:
        record(cases, wanted, arguments.record)
    return int(same < len(wanted))


if __name__ == "__main__":
    sys.exit(main())
