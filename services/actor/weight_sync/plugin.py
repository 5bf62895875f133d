"""The `vllm.general_plugins` entry point `pipelinerl`, which registers the weight-transfer backend of that name.

vLLM calls `register` in each of its processes. This module imports vLLM only then, and torch only when an engine is made. It
also sets up logging, so that an actor's engine processes write the same kind of log lines as the actor.
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
    """Register the backend. Idempotent, as vLLM requires of plugins."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "services.actor.weight_sync.backend", "PipelineRLWeightEngine")
    log_as_the_actor()


def log_as_the_actor() -> None:
    """Set up logs in a process of vLLM that an actor started, if neither the process nor vLLM has set them up."""
    if logging.getLogger().handlers or os.environ.get("VLLM_CONFIGURE_LOGGING") != "0":
        return
    try:
        settings = read_settings(ActorSettings)
    except UserError:
        return  # an engine without an actor
    context = LogContext(settings.run, "actor", settings.instance)
    configure_logging(context, log_format=settings.log_format, level=settings.log_level)
    take_over("torch", "transformers")
