"""`pipelinerl cache`: lists the initial models that runs on this machine have built and kept; `--clear` removes them."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path

from pipelinerl.commands import Command
from pipelinerl.errors import FieldError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clear", metavar="MODEL", nargs="*",
        help="remove these, or all of them; a run that goes on needs its own for restarts",
    )  # fmt: skip


def execute(args: argparse.Namespace) -> int:
    """Exit code 0. Raises `FieldError` for a model that is not there, with none removed, or that cannot be removed."""
    import os
    import shutil

    from pipelinerl.initial_model import cache_folder

    folder = cache_folder(os.environ) / "models"
    kept = {path.name: path for path in sorted(folder.glob("[!.]*"))} if folder.is_dir() else {}
    chosen = args.clear or list(kept)
    for name in chosen:
        if name not in kept:
            raise FieldError("--clear", name, f"is not in {folder}; pipelinerl cache lists what is")
    sizes = {name: _bytes_in(kept[name]) for name in chosen}
    for name, size in sizes.items():
        built = datetime.fromtimestamp(kept[name].stat().st_mtime).isoformat(" ", "minutes")
        if args.clear is not None:
            try:
                shutil.rmtree(kept[name])
            except OSError as error:
                raise FieldError("--clear", name, f"cannot be removed: {error.strerror}") from error
        print(f"{'removed  ' if args.clear is not None else ''}{size / 2**20:9,.1f} MiB  {built}  {name}")
    print(f"{sum(sizes.values()) / 2**20:,.1f} MiB in {len(sizes)} models of {folder}")
    return 0


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


COMMAND = Command("cache", "list the initial models that are kept for the next run, or remove them", add_arguments, execute)
