"""When the cluster's tests run: on Linux with root, and releases only when what they show has changed since they passed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kernel import why_not_here

ROOT = Path(__file__).resolve().parents[2]
VERIFIED = Path(__file__).with_name("verified.txt")
"""Hash of the shown files when all releases last passed. A passing run writes it; commit it."""
SHOWN = (
    "deploy/helm",
    "deploy/images",
    "requirements/images",
    "services/*/Dockerfile",
    "services/*/__main__.py",
    "pipelinerl/kube",
    "pipelinerl/service/settings.py",
    "tests/cluster",
    "tests/faults/network.py",
)
RELEASES, NUM_RELEASES = "test_chart_runs.py", 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    releases = [item for item in items if item.path.name == RELEASES]
    recorded = VERIFIED.read_text().strip() if VERIFIED.exists() else ""
    if releases and not config.getoption("--all-releases") and recorded == shown_hash():
        config.hook.pytest_deselected(items=releases)
        items[:] = [item for item in items if item not in releases]


def shown_hash() -> str:
    """Of names and contents of the files that decide how a release behaves in the cluster."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SHOWN for path in ROOT.glob(pattern)):
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and file != VERIFIED and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(ROOT)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()


@pytest.fixture(scope="session")
def kernel() -> None:
    reason = why_not_here()
    if reason:
        pytest.skip(f"the mini cluster: {reason}")


@pytest.fixture(scope="module")
def verified(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keeps the hash of what was shown, unless a test of the module failed or was not run."""
    before, failed = shown_hash(), request.session.testsfailed
    yield
    chosen = {item.name for item in request.session.items if item.path.name == RELEASES}
    if request.session.testsfailed == failed and shown_hash() == before and len(chosen) == NUM_RELEASES:
        VERIFIED.write_text(f"{before}\n", encoding="utf-8")
