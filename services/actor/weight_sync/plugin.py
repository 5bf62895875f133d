"""The `vllm.general_plugins` entry point `pipelinerl`: makes the weight-transfer backend of that name known to vLLM.

vLLM calls `register` in each of its processes. Nothing is imported from vLLM before that, nor torch before an engine is made.
An actor's engine processes write log lines as the actor itself does.
"""

from __future__ import annotations

import logging
import os
from functools import cache

from pipelinerl.errors import UserError
from pipelinerl.service.logs import LogContext, configure_logging, take_over
from pipelinerl.service.settings import ActorSettings, read_settings

BACKEND = "pipelinerl"


@cache
def register() -> None:
    """Idempotent, as vLLM asks of plugins."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "services.actor.weight_sync.backend", "PipelineRLWeightEngine")
    log_as_the_actor()


def log_as_the_actor() -> None:
    """Sets up logs in a process of vLLM that has none, where an actor started it and vLLM leaves them alone."""
    if logging.getLogger().handlers or os.environ.get("VLLM_CONFIGURE_LOGGING") != "0":
        return
    try:
        settings = read_settings(ActorSettings)
    except UserError:
        return  # an engine without an actor
    context = LogContext(settings.run, "actor", settings.instance)
    configure_logging(context, log_format=settings.log_format, level=settings.log_level)
    take_over("torch", "transformers")
