"""Programs that tests run and `make install` does not bring: Prometheus, promtool, Chromium (`make test-tools`)."""

import os
import shutil
import sys
from pathlib import Path

import pytest


def tool(name: str) -> str:
    """Path of the program, looked for beside the interpreter and on PATH. Skips the test where it is missing, or fails it
    where PIPELINERL_TEST_TOOLS is `required`."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        missing = f"no {name}: make test-tools installs it"
        if os.environ.get("PIPELINERL_TEST_TOOLS") == "required":
            pytest.fail(missing)
        pytest.skip(missing)
    return found
