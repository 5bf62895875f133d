"""Result files: what is measured is written, and what is not measured this time keeps its place."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any


def kept_rows(path: Path, key: str, measured: Collection[object]) -> list[dict[str, Any]]:
    """Rows of an earlier result in `path` of which `key` is not among the `measured`."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    return [row for row in rows if row[key] not in measured]


def kept_cases(path: Path, known: Collection[str]) -> dict[str, Any]:
    """Cases of an earlier result in `path`, without those that there no longer are."""
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.is_file() else {}
    return {name: cases[name] for name in known if name in cases}


def write_result(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
