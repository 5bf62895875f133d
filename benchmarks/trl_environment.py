"""TRL's environment: made once, beside ours, from requirements/trl.txt; again when that file changes.

In it, the repository is on the import path instead of being installed: the reward functions that score TRL's completions are
the verifier's own. Nothing of ours is measured in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from pipelinerl.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(sys.prefix, "trl")
REQUIREMENTS = ROOT / "requirements" / "trl.txt"
_BUILD_TOOLS = ROOT / "requirements" / "images" / "build.txt"
_INSTALL_TORCH = ROOT / "deploy" / "images" / "install_torch.sh"
_SHOWN_LINES = 12


def trl_python() -> Path:
    """Its interpreter. Installing takes a minute or two. Raises `UserError` with what pip said last."""
    python, installed = FOLDER / "bin" / "python", FOLDER / "installed.txt"
    if installed.is_file() and installed.read_bytes() == REQUIREMENTS.read_bytes():
        return python
    print(f"installing TRL into {FOLDER}, once", file=sys.stderr, flush=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    quiet = ("--quiet", "--disable-pip-version-check")
    install = (str(python), "-m", "pip", "install", "--no-deps", "--require-hashes", "--no-build-isolation", *quiet)
    for command in (
        (sys.executable, "-m", "venv", str(FOLDER)),
        (*install, "-r", str(_BUILD_TOOLS)),
        (str(_INSTALL_TORCH), str(REQUIREMENTS), str(python), *quiet),
        (*install, "-r", str(REQUIREMENTS)),
    ):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            said = "\n".join(done.stdout.splitlines()[-_SHOWN_LINES:])
            raise UserError(f"TRL cannot be installed from {REQUIREMENTS.relative_to(ROOT)}: {' '.join(command)}\n{said}")
    shutil.copyfile(REQUIREMENTS, installed)
    return python


def trl_environment() -> dict[str, str]:
    """Variables of a process in it: nothing is fetched unless the caller's environment says so."""
    return {"HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}


def pinned(package: str) -> str:
    """Version of a package in it, by the pins."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    return dict(line.split()[0].split("==") for line in lines if "==" in line and not line.startswith("#"))[package]
