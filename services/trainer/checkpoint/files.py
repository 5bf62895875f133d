"""Replace checkpoint folders as a whole: a new folder is written under another name, and then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelinerl.run_dir import RUN_STATE


def link_tree(source: Path, target: Path) -> None:
    """Hard-link the files of `source` into `target`, or copy them if that fails. Omit the folder `resume`. Raises `OSError`."""
    ignored = shutil.ignore_patterns(RUN_STATE.parent.name)
    shutil.copytree(source, target, ignore=ignored, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> str:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
    return target


_PARTIAL, _REPLACED = ".partial-", ".old-"


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a new path, which replaces `folder` if the block succeeds and is removed otherwise. After a crash, call `tidy`."""
    partial = folder.with_name(f".{folder.name}{_PARTIAL}{os.getpid()}")
    replaced = folder.with_name(f".{folder.name}{_REPLACED}{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        if folder.exists():
            os.replace(folder, replaced)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


def tidy(parent: Path) -> None:
    """Clean `parent` after a killed write: remove partial folders, and restore an old folder if the new one is missing."""
    for replaced in parent.glob(f".*{_REPLACED}*"):
        folder = parent / replaced.name[1:].partition(_REPLACED)[0]
        if not folder.exists():
            os.replace(replaced, folder)
    for path in (*parent.glob(f".*{_PARTIAL}*"), *parent.glob(f".*{_REPLACED}*")):
        shutil.rmtree(path, ignore_errors=True)


def link_export(step_folder: Path, folder: Path) -> Path:
    """Replace `folder` with the policy's export from the checkpoint `step_folder`, without the training state."""
    with replacing(folder) as partial:
        link_tree(step_folder, partial)
    return folder
