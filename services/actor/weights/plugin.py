"""The `vllm.general_plugins` entry point `pipelinerl`: makes the weight-transfer backend of that name known to vLLM.

vLLM calls `register` in each of its processes. Nothing is imported from vLLM before that, nor torch before an engine is made.
"""

from __future__ import annotations

from functools import cache

BACKEND = "pipelinerl"


@cache
def register() -> None:
    """Idempotent, as vLLM asks of plugins."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "services.actor.weights.engine", "PipelineRLWeightEngine")
