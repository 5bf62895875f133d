"""`python -m services.trainer`: one training run, configured by environment variables (pipelinerl/config/settings.py)."""

from __future__ import annotations

import asyncio

from pipelinerl.config.settings import TrainerSettings
from pipelinerl.service.lifecycle import leave, run_service
from pipelinerl.service.logs import LogContext


async def run(settings: TrainerSettings, stop: asyncio.Event, context: LogContext) -> None:
    from services.trainer.app import serve

    await serve(settings, stop, context)


def main() -> int:
    return run_service(TrainerSettings, "trainer", run)


if __name__ == "__main__":
    leave(main())
