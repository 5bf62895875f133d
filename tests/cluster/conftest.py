"""When the cluster's tests run: on Linux with root, and releases only when what they show has changed since they passed."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chart.rendering import Rendered
from tests.cluster.cluster import mini_cluster
from tests.cluster.objects import ClusterError
from tests.faults import network

ROOT = Path(__file__).resolve().parents[2]
VERIFIED = Path(__file__).with_name("verified.txt")
"""Hash of the shown files when all releases last passed. A passing run writes it; commit it."""
SHOWN = (
    "deploy/helm",
    "deploy/images",
    "requirements/images",
    "services/*/Dockerfile",
    "services/*/__main__.py",
    "pipelinerl/commands/submit.py",
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
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SHOWN for path in ROOT.glob(pattern)):
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and file != VERIFIED and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(ROOT)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where pods cannot be run: a container that runs `true` is the surest way to know."""
    reason = "needs Linux" if sys.platform != "linux" else network.why_not_here()
    reason = reason or asyncio.run(_why_no_container(tmp_path_factory.mktemp("probe") / "cluster"))
    if reason:
        pytest.skip(f"the mini cluster: {reason}")


async def _why_no_container(folder: Path) -> str:
    container = {"name": "probe", "image": "tool", "command": ["true"]}
    spec = {"restartPolicy": "Never", "enableServiceLinks": False, "containers": [container]}
    async with mini_cluster(folder, Rendered([])) as cluster:
        pod = cluster.create({"kind": "Pod", "metadata": {"name": "probe"}, "spec": spec})
        assert pod is not None, cluster.failures
        try:
            await cluster.until(lambda: pod.finished, 120, "a container ends")
        except ClusterError as error:
            return str(error)
        return "" if pod.phase == "Succeeded" else pod.logs()


@pytest.fixture(scope="module")
def verified(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keeps the hash of what was shown, unless a test of the module failed or was not run."""
    before, failed = shown_hash(), request.session.testsfailed
    yield
    chosen = {item.name for item in request.session.items if item.path.name == RELEASES}
    if request.session.testsfailed == failed and shown_hash() == before and len(chosen) == NUM_RELEASES:
        VERIFIED.write_text(f"{before}\n", encoding="utf-8")
