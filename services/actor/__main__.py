"""`python -m services.actor`: run one actor, configured by environment variables (pipelinerl/service/settings.py)."""

from __future__ import annotations

import asyncio
import os

from pipelinerl.local.services import keep_to_quota
from pipelinerl.service.lifecycle import leave, run_service
from pipelinerl.service.logs import LogContext, take_over
from pipelinerl.service.settings import ActorSettings


async def run(settings: ActorSettings, stop: asyncio.Event, context: LogContext) -> None:
    keep_to_quota(os.environ, 1)  # before anything loads torch
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # vLLM's log lines go through our handler
    os.environ.pop("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", None)  # vLLM would send spans there; `settings` holds the value
    from services.actor.app import serve

    take_over("torch", "transformers")
    await serve(settings, stop, context)


def main() -> int:
    return run_service(ActorSettings, "actor", run)


if __name__ == "__main__":
    leave(main())
