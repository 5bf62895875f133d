"""PipelineRL: reinforcement learning with in-flight weight updates, on Kubernetes.

The services share this package. Only `transfer` and `policy` import torch, and nothing here but `policy` imports transformers.
`train`, `start` and `Run` are for Python programs and notebooks. The module that defines them is imported on first use.
"""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("train", "start", "Run"):
        return getattr(importlib.import_module("pipelinerl.api"), name)
    raise AttributeError(f"module 'pipelinerl' has no attribute {name!r}")
