"""What a person sees of the make targets, without running them."""

from __future__ import annotations

from pathlib import Path

MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"


def test_installing_says_what_it_does_and_leaves_pips_log_out() -> None:
    lines = MAKEFILE.read_text(encoding="utf-8").splitlines()
    installs = [line for line in lines if "pip install" in line]
    assert len(installs) >= 4
    assert [line for line in installs if "--quiet" not in line] == []
