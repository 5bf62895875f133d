"""The real actor with vLLM, and how long its decode steps took by how many sequences were in progress.

Run as `python -m benchmarks.timed_actor FILE`, configured as `services.actor` is; FILE gets at the end, for each number of
sequences in progress, how many steps there were and their seconds. A step is timed as the actor's own metric is: from one
report of the engine to the next.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pipelinerl.local.services import keep_to_quota
from pipelinerl.run_dir import write_json
from pipelinerl.service.lifecycle import leave, run_service
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import ActorSettings
from services.actor.engine import InferenceEngine, OnStep


@asynccontextmanager
async def start_timed(file: Path, *arguments: Any, on_step: OnStep, **options: Any) -> AsyncIterator[InferenceEngine]:
    """As `start_engine`, with the file written at its end."""
    from services.actor.vllm_engine import start_engine

    steps: dict[int, tuple[int, float]] = {}
    engines: list[InferenceEngine] = []

    def noted(decode_s: float | None, kv_cache_usage: float) -> None:
        on_step(decode_s, kv_cache_usage)
        in_progress = len(engines[0].progress()) if engines else 0
        if decode_s is not None and in_progress:
            count, seconds = steps.get(in_progress, (0, 0.0))
            steps[in_progress] = count + 1, seconds + decode_s

    async with start_engine(*arguments, on_step=noted, **options) as engine:
        engines.append(engine)
        try:
            yield engine
        finally:
            write_json(file, {str(in_progress): steps[in_progress] for in_progress in sorted(steps)})


async def run(settings: ActorSettings, stop: Any, context: LogContext) -> None:
    keep_to_quota(os.environ, 1)
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    from services.actor.app import serve

    await serve(settings, stop, context, partial(start_timed, Path(sys.argv[1])))


if __name__ == "__main__":
    leave(run_service(ActorSettings, "actor", run))
