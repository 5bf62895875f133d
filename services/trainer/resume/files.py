"""Files that are on disk, whole, or not there: written beside their name, fsynced, renamed. No format of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_durably(path: Path, data: bytes) -> None:
    """Replaces `path` at once; a crash leaves the old one or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def write_json_durably(path: Path, value: Mapping[str, Any]) -> None:
    write_durably(path, json.dumps(value).encode() + b"\n")


def sync_folder(folder: Path) -> None:
    """Names in `folder` that were made or changed are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Every file and folder in `folder`, and itself."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
