"""tests/install_tools.sh on other systems than this one, by programs that stand for the system's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "install_tools.sh"
PROGRAMS = {
    "apt-get": 'echo "$@" >>"$LOG"; [ "$1" != download ] || touch prometheus_1_all.deb',
    "dpkg-deb": 'mkdir -p "$3/usr/bin"; touch "$3/usr/bin/prometheus" "$3/usr/bin/promtool"',
    "chromium": "true",
}


def installed(folder: Path, system: str, *there: str) -> tuple[str, list[str]]:
    """What it says, and what it asked apt-get for, where the programs `there` were there before."""
    programs, bin_ = folder / "programs", folder / "bin"
    for name, text in PROGRAMS.items():
        _write_program(programs / name, f"#!/bin/sh\n{text}\n")
    bin_.mkdir()
    for name in there:
        _write_program(bin_ / name, "#!/bin/sh\n")
    release, log = folder / "os-release", folder / "log"
    release.write_text(f"NAME=x\nID={system}\n")
    log.touch()
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "OS_RELEASE": str(release), "LOG": str(log)}
    done = subprocess.run([SCRIPT, bin_], env=environment, capture_output=True, text=True, timeout=30, check=True)
    return done.stderr, log.read_text().splitlines()


def _write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize("there", [(), ("promtool",), ("prometheus",)])
def test_prometheus_comes_with_promtool(tmp_path: Path, there: tuple[str, ...]) -> None:
    _, asked = installed(tmp_path, "debian", *there)
    assert [line.split()[0] for line in asked] == ["update", "download"]
    assert {path.name for path in (tmp_path / "bin").iterdir()} == {"prometheus", "promtool"}


def test_nothing_is_done_where_the_tools_are_there(tmp_path: Path) -> None:
    assert installed(tmp_path, "debian", "prometheus", "promtool") == ("", [])


def test_another_system_is_told_what_to_install_and_goes_on(tmp_path: Path) -> None:
    said, asked = installed(tmp_path, "ubuntu")
    assert "not Debian: install Chromium, Node.js, prometheus and promtool by hand" in said
    assert asked == []
