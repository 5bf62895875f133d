"""The chart as `helm template` renders it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.images import SOURCE
from tests.cluster.objects import Objects

CHART = SOURCE / "deploy" / "helm"
RELEASE, NAMESPACE = "pipelinerl", "train"


def rendered(folder: Path, values: dict[str, Any], *value_files: str) -> Objects:
    """`values` over `value_files` of the chart over its own. `folder` takes a file and helm's caches."""
    own = folder / "values.yaml"
    own.write_text(yaml.safe_dump(values))
    files = [str(CHART / name) for name in value_files] + [str(own)]
    command = [str(Path(sys.executable).with_name("helm")), "template", RELEASE, str(CHART), "--namespace", NAMESPACE]
    for file in files:
        command += ["--values", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"HOME": str(folder)}, check=False)
    if done.returncode:
        raise AssertionError(f"helm template failed: {done.stderr}")
    return Objects.parse(done.stdout)
