"""The `vllm.general_plugins` entry point `pipelinerl`. vLLM calls `register` in each of its processes."""

from __future__ import annotations

import logging
import os
from functools import cache

from pipelinerl.errors import UserError
from pipelinerl.service.logs import LogContext, configure_logging, take_over
from pipelinerl.service.settings import ActorSettings, read_settings


@cache
def register() -> None:
    """Register the weight-transfer backend `pipelinerl`. Idempotent, as vLLM requires of plugins."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine("pipelinerl", "services.actor.weight_sync.backend", "PipelineRLWeightEngine")
    log_as_the_actor()


def log_as_the_actor() -> None:
    """Set up logs in the actor's format, in a vLLM process that an actor started, unless logs are already set up."""
    if logging.getLogger().handlers or os.environ.get("VLLM_CONFIGURE_LOGGING") != "0":
        return
    try:
        settings = read_settings(ActorSettings)
    except UserError:
        return  # no actor started this engine
    context = LogContext(settings.run, "actor", settings.instance)
    configure_logging(context, log_format=settings.log_format, level=settings.log_level)
    take_over("torch", "transformers")
