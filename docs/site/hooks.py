"""What mkdocs builds the site from beside `docs/`: pages that are generated, and what pages link to.

Every file keeps the path that it has in the repository, so a link leads to the same page on the site as on GitHub.
Generated are the command line from its parsers, the recipe from its dataclasses, and the API from docstrings.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

import hf_dart
from hf_dart.cli import parser as command_line
from hf_dart.drafters.registry import trainers
from hf_dart.training import recipe

_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[#)])|(?<=src=\")([^\"]+)(?=\")")
_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Return the theme's files, the pages of the navigation, what they link to, and what is generated."""
    root = Path(config.config_file_path).parent
    found = Files([file for file in files if file.src_dir != config.docs_dir])
    generated = _generated()
    waiting = [path for path in _pages(config.nav) if path not in generated]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not (root / path).exists():
            continue  # mkdocs says which page links to it
        if (root / path).is_dir():
            generated[f"{path}/README.md"] = _listing(root / path)
            links = [str(file.relative_to(root)) for file in _contents(root / path)]
        else:
            found.append(File(path, str(root), config.site_dir, config.use_directory_urls))
            links = _links(root, path) if path.endswith(".md") else []
        waiting += [link for link in links if link not in seen]
        seen |= set(links)
    for path, text in generated.items():
        found.append(File.generated(config, path, content=text))
    return found


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to folders lead to their page; formulas become MathML, which needs no script."""
    root = Path(config.config_file_path).parent
    here = (root / page.file.src_uri).parent

    def of_folder(found: re.Match[str]) -> str:
        target = found[0]
        return f"{target.rstrip('/')}/README.md" if (here / target).is_dir() else target

    formula = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    markdown = formula.sub(lambda found: convert(found[1], display="block"), markdown)
    return _outside_code(markdown, lambda text: _LINK.sub(of_folder, text))


def _outside_code(markdown: str, change: Any) -> str:
    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [change(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])


def _pages(nav: Any) -> Iterable[str]:
    """Yield the paths in a navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages(one)


def _links(root: Path, path: str) -> list[str]:
    """Return the files and folders of the repository that a page links to; a folder with a README is that page."""
    links = []
    for found in _LINK.finditer(_CODE.sub("", (root / path).read_text(encoding="utf8"))):
        if ":" in found[0]:
            continue
        target = os.path.normpath(Path(path).parent / found[0])
        readme = f"{target}/README.md"
        links.append(readme if (root / readme).is_file() else target)
    return links


def _contents(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))


def _listing(folder: Path) -> str:
    return "\n".join([f"# {folder.name}", "", *(f"- [{file.name}]({file.name})" for file in _contents(folder))])


# ---- generated pages ---------------------------------------------------------------------------------------------


def _generated() -> dict[str, str]:
    """All generated pages, by path."""
    return {
        "docs/reference/cli.md": _commands(),
        "docs/reference/recipe.md": _recipe(),
        "docs/reference/hf_dart.md": _names("hf_dart", hf_dart.__all__),
        "docs/reference/training.md": _names("hf_dart.training", import_module("hf_dart.training").__all__),
        "docs/reference/interfaces.md": _modules("Interfaces", _INTERFACES),
    }


_INTERFACES = {
    "A call": (
        "hf_dart.decoding.session.DartGenerateOutput",
        "hf_dart.decoding.stats.DraftStats",
        "hf_dart.engine.graphs.EngineConfig",
        "hf_dart.serve.handle.Handle",
        "hf_dart.learning.learner.LearnerStats",
    ),
    "A drafter of your own": (
        "hf_dart.drafters.base.Drafter",
        "hf_dart.drafters.base.Proposal",
        "hf_dart.drafters.trained.TrainedDrafter",
        "hf_dart.drafters.base_config.DrafterConfig",
        "hf_dart.drafters.base_config.HeadConfig",
        "hf_dart.drafters.registry.register",
        "hf_dart.training.trainers.trainer.DrafterTrainer",
        "hf_dart.hub.kinds.CardTexts",
    ),
    "N-gram tables": ("hf_dart.trees.ngram.build.build", "hf_dart.trees.ngram.build.merge"),
    "The Hub": ("hf_dart.hub.publish.push_folder",),
    "Errors": ("hf_dart.errors.UserError",),
}


_USED = (
    "from_pretrained", "from_target", "save_pretrained", "push_to_hub", "bind", "generate", "ngram",
    "tree_config", "last_stats", "add_adapter", "load_adapter", "set_adapter", "merge_adapter", "train", "evaluate",
    "save_model", "record",
)  # fmt: skip


def _names(package: str, names: Iterable[str]) -> str:
    """Return a page with an entry for every public name of a package, functions first."""
    shown = sorted((name for name in names if not name.startswith("__")), key=lambda name: (name[0].isupper(), name))
    # Of what is inherited, what a user calls; "Interfaces" has the rest.
    options = f"    options: {{inherited_members: [{', '.join(_USED)}]}}"
    return "\n\n".join([f"# {package}", *(f"::: {package}.{name}\n{options}" for name in shown)])


def _modules(title: str, parts: dict[str, Iterable[str]]) -> str:
    lines = [f"# {title}"]
    for heading, paths in parts.items():
        lines += [f"## {heading}", *(f"::: {path}\n    options: {{heading_level: 3}}" for path in paths)]
    return "\n\n".join(lines)


def _commands() -> str:
    """Every command, with its options."""
    lines = ["# Command line", "`hf-dart COMMAND --help` prints the same. The options of `hf-dart train` are those of"]
    lines[-1] += " a [recipe](recipe.md)."
    for name, parser, about in _subcommands(command_line()):
        lines += [f"## hf-dart {name}", f"{about[:1].upper()}{about[1:]}."]
        for deeper, inner, said in [(name, parser, ""), *_nested(name, parser)]:
            if deeper != name:
                lines += [f"### hf-dart {deeper}", f"{said[:1].upper()}{said[1:]}."]
            if inner.add_help:
                lines += [_options(inner)]
    return "\n\n".join(lines)


def _nested(name: str, parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser, str]]:
    return [(f"{name} {inner}", deeper, said) for inner, deeper, said in _subcommands(parser)]


def _subcommands(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser, str]]:
    """Name, parser and help of each command of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {one.dest: one.help or "" for one in action._choices_actions}
            return [(name, inner, said.get(name, "")) for name, inner in action.choices.items()]
    return []


def _options(parser: argparse.ArgumentParser) -> str:
    """Return a table of a parser's arguments."""
    rows = ["| | |", "|---|---|"]
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)) or action.help == argparse.SUPPRESS:
            continue
        formatter = parser._get_formatter()
        value = "" if action.nargs == 0 else formatter._format_args(action, _metavar(action))
        names = ", ".join(action.option_strings)
        said = formatter._expand_help(action) if action.help else ""
        rows.append(f"| <code>{_cell(f'{names} {value}'.strip())}</code> | {_cell(said)} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def _metavar(action: argparse.Action) -> str:
    return action.dest.upper() if action.option_strings and action.choices is None else action.dest


def _cell(text: str) -> str:
    escapes = {"|": "\\|", "<": "&lt;", "{": "&#123;"}  # no table cell, no tag, no attributes
    return " ".join(text.split()).translate(str.maketrans(escapes))


def _recipe() -> str:
    """Every key of a recipe: the fields of the dataclasses that `hf-dart train` reads."""
    lines = [
        "# Recipe",
        "Every key of a recipe, which is also a flag of `hf-dart train`; a flag overrides the file. `learning_rate: "
        "1.0e-3` in the file is `--learning_rate 1.0e-3` on the command line.",
        "<style>td:first-child code {white-space: nowrap}</style>",  # keys are looked for whole
    ]
    keys: dict[type, list[argparse.Action]] = {}
    kinds: dict[type, list[str]] = {}
    for kind in trainers():
        parser = recipe.parser(kind)
        actions = {action.dest: action for action in reversed(parser._actions)}
        for part in (part for group in parser.dataclass_types for part in reversed(group.__mro__)):
            own = [actions[name] for name in vars(part).get("__annotations__", {}) if name in actions]
            if own:
                keys.setdefault(part, own)
                kinds.setdefault(part, []).append(kind)
    for part in sorted(keys, key=lambda part: not part.__module__.startswith("hf_dart")):  # what is inherited, last
        some = "" if len(kinds[part]) == len(trainers()) else f"With `drafter: {'` or `'.join(kinds[part])}`."
        about = (part.__doc__ or "").partition("\n\n")[0] if part.__module__.startswith("hf_dart") else ""
        about = re.sub(r"\[(`\w+`)\]", r"\1", " ".join(about.split()))
        lines += [f"## {part.__name__}", f"{about} {some}".strip(), _keys(keys[part])]
    return "\n\n".join(lines)


def _keys(actions: Iterable[argparse.Action]) -> str:
    rows = ["| key | default | |", "|---|---|---|"]
    for action in actions:
        default = "" if action.default in (None, argparse.SUPPRESS) else f"<code>{_cell(str(action.default))}</code>"
        choices = f" One of {', '.join(f'`{one}`' for one in action.choices)}." if action.choices else ""
        said = _cell(action.help or "").rstrip(".")
        rows.append(f"| `{action.dest}` | {default} | {f'{said}.' if said else ''}{choices} |")
    return "\n".join(rows)
