"""Files that are on the disk, and not only in the kernel's memory, when a function returns. Writes none itself."""

from __future__ import annotations

import os
from pathlib import Path


def sync_tree(folder: Path) -> None:
    """Everything in `folder`, at any depth, and its name in the folder that it is in. Raises `OSError`."""
    for path in folder.rglob("*"):
        sync_path(path)
    sync_path(folder)
    sync_path(folder.parent)


def sync_path(path: Path) -> None:
    """One file's bytes, or which names a folder has."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
