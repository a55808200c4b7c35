"""`hf-dart push`: put a drafter on the Hub, with its card."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_dart.errors import as_user_error


def add(commands: Any) -> None:
    parser = commands.add_parser("push", help="put a drafter on the Hub, with a card written from its files")
    parser.add_argument("folder", type=Path, help="folder that save_pretrained or a trainer wrote")
    parser.add_argument("repository", help="user/name on the Hub; created if it does not exist")
    parser.add_argument("--bench", type=Path, metavar="FILE", help="JSON file of hf-dart bench --json, for the table")
    parser.add_argument("--base-model", metavar="ID", help="the target on the Hub (default: as in the head's config)")
    parser.add_argument("--license", metavar="ID", help="licence, such as apache-2.0")
    parser.add_argument("--language", nargs="+", default=(), metavar="CODE", help="languages, such as en")
    parser.add_argument("--datasets", nargs="+", default=(), metavar="ID", help="the Hub data sets it was trained on")
    parser.add_argument("--private", action="store_true", default=None, help="create the repository as a private one")
    parser.add_argument("--revision", metavar="BRANCH", help="default: main")
    parser.add_argument("--create-pr", action="store_true", help="push as a pull request")
    parser.add_argument("--dry-run", type=Path, metavar="DIR", help="write all to this new or empty folder instead")
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hf_dart.drafters.registry import registered
    from hf_dart.hub.publish import push_folder, write_folder

    registered()  # so that cards of all kinds can be written
    facts = ("bench", "base_model", "license", "language", "datasets")
    known = {name: getattr(arguments, name) for name in facts}
    with as_user_error():
        if arguments.dry_run is not None:
            write_folder(arguments.folder, arguments.dry_run, arguments.repository, **known)
            print(f"Wrote {arguments.dry_run}; nothing was pushed.")
            return 0
        where = {name: getattr(arguments, name) for name in ("private", "revision", "create_pr")}
        commit = push_folder(arguments.folder, arguments.repository, **where, **known)
    print(commit.pr_url or commit.commit_url)
    return 0
