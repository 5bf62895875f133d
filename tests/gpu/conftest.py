"""Tests that need a GPU: skipped where there is none."""

from __future__ import annotations

import ctypes

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    without = pytest.mark.skip(reason=f"no CUDA device (torch {torch.__version__}, built for {torch.version.cuda or 'CPU'})")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(without)


def nccl_version() -> tuple[int, ...]:
    try:
        library, number = ctypes.CDLL("libnccl.so.2"), ctypes.c_int()
    except OSError:  # NCCL is part of this torch
        return torch.cuda.nccl.version()
    library.ncclGetVersion(ctypes.byref(number))
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Devices of two NCCL ranks: two GPUs, or one that both share, which NCCL allows from 2.30 on and only when told to."""
    if torch.cuda.device_count() > 1:
        return "cuda:0", "cuda:1"
    version = nccl_version()
    if version < (2, 30):
        pytest.skip(f"one GPU, and NCCL {version} has no two ranks on it (needs 2.30)")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    return "cuda:0", "cuda:0"
