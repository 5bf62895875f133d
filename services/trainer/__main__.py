"""`python -m services.trainer`: execute the training run that environment variables describe (pipelinerl/service/settings.py).
With several ranks, this process is torchrun's agent, which runs the same command for each rank."""

from __future__ import annotations

import asyncio

from pipelinerl.service.lifecycle import leave, run_service
from pipelinerl.service.logs import LogContext, take_over
from pipelinerl.service.settings import RankSettings, TrainerSettings


async def run(settings: TrainerSettings, stop: asyncio.Event, context: LogContext) -> None:
    ranks = RankSettings()
    if ranks.rank == 0:
        from pipelinerl.kube.completion import failure_told
        from services.trainer.app import serve

        take_over("torch", "transformers")
        async with failure_told(settings):
            await serve(settings, ranks, stop, context)
    else:
        from services.trainer.worker import serve_rank

        take_over("torch", "transformers")
        await serve_rank(settings, ranks, context)


def main() -> int:
    if RankSettings().world_size == 1:
        from services.trainer.launch import launch_ranks

        code = launch_ranks()
        if code is not None:
            return code
    return run_service(TrainerSettings, "trainer", run)


if __name__ == "__main__":
    leave(main())
