"""`pipelinerl cache`: list the initial models and compiled code that runs on this machine keep for the next run. `--clear`
removes them."""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path

from pipelinerl.commands import Command
from pipelinerl.errors import FieldError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    clear = parser.add_argument(
        "--clear", metavar="NAME", nargs="*",
        help="remove these entries, or all; a running run needs its own for restarts",
    )  # fmt: skip
    clear.completer = lambda **_: list(_kept())  # type: ignore[attr-defined]


def _kept() -> dict[str, Path]:
    """Return the folders by name."""
    import os

    from pipelinerl.initial_model import COMPILED, cache_folder

    folder = cache_folder(os.environ)
    found = [*sorted(folder.glob("models/[!.]*")), *folder.glob(COMPILED)]
    return {path.name: path for path in found if path.is_dir() and any(path.iterdir())}


def execute(args: argparse.Namespace) -> int:
    """Return exit code 0. Raises `FieldError` for a missing entry, before anything is removed, or for one that cannot be
    removed."""
    import os
    import shutil

    from pipelinerl.initial_model import COMPILED, cache_folder

    folder, kept = cache_folder(os.environ), _kept()
    chosen = args.clear or list(kept)
    for name in chosen:
        if name not in kept:
            raise FieldError("--clear", name, f"is not in {folder}; pipelinerl cache lists its entries")
    sizes = {name: _bytes_in(kept[name]) for name in chosen}
    for name, size in sizes.items():
        built = datetime.fromtimestamp(kept[name].stat().st_mtime).isoformat(" ", "minutes")
        if args.clear is not None:
            try:
                shutil.rmtree(kept[name])
                if name == COMPILED:
                    kept[name].mkdir()  # engines of a running run look for it there
            except OSError as error:
                raise FieldError("--clear", name, f"cannot be removed: {error.strerror}") from error
        print(f"{'removed  ' if args.clear is not None else ''}{size / 2**20:9,.1f} MiB  {built}  {name}")
    print(f"{sum(sizes.values()) / 2**20:,.1f} MiB in {len(sizes)} of {folder}")
    return 0


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


COMMAND = Command("cache", "list or remove files kept for the next run, such as initial models", add_arguments, execute)
