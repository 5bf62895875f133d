"""Tests that need a GPU: skipped where there is none, and reported with the devices that they ran on."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
import torch

MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    without = pytest.mark.skip(reason=f"no CUDA device (torch {torch.__version__} is {built})")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(without)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not torch.cuda.is_available():
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    terminalreporter.section("devices")
    terminalreporter.line(
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {_dotted(nccl_version())}: {', '.join(names)}"
    )


def nccl_version() -> tuple[int, ...]:
    try:
        library, number = ctypes.CDLL("libnccl.so.2"), ctypes.c_int()
    except OSError:  # NCCL is part of this torch
        return torch.cuda.nccl.version()
    library.ncclGetVersion(ctypes.byref(number))
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@pytest.fixture
def two_ranks() -> Iterator[tuple[str, str]]:
    """Devices of two NCCL ranks: two GPUs, or one that both share, which NCCL allows from 2.30 on and only when told to."""
    if torch.cuda.device_count() > 1:
        yield "cuda:0", "cuda:1"
        return
    version = nccl_version()
    if version < (2, 30):
        pytest.skip(f"one GPU, and NCCL {_dotted(version)} has no two ranks on it (needs 2.30)")
    before = os.environ.get(MULTI_RANK)
    os.environ[MULTI_RANK] = "1"
    yield "cuda:0", "cuda:0"
    if before is None:
        del os.environ[MULTI_RANK]
