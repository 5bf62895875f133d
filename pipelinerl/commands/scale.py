"""`pipelinerl scale actors N --run-dir DIR`: add or remove actors of a running run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl.commands import Command
from pipelinerl.errors import FieldError, ServiceError, counted

if TYPE_CHECKING:
    from pipelinerl.run_dir import RunDir

_LOOK_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["actors"], help="service to scale")
    parser.add_argument("count", metavar="N", type=int, help="the wanted number")
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="maximum wait until all serve (300 s)")


def execute(args: argparse.Namespace) -> int:
    """Wait until N actors serve. Raises `FieldError` for a wrong count or folder, `ServiceError` after the timeout."""
    import asyncio

    from pipelinerl.local.processes import running_pids
    from pipelinerl.run_dir import MOST_ACTORS, RunDir, write_json

    run_dir = RunDir(args.run_dir, args.run_dir.name)
    if not 0 <= args.count <= MOST_ACTORS:
        raise FieldError("N", args.count, f"a run on one machine has 0 to {MOST_ACTORS} actors")
    running_pids(run_dir)
    write_json(run_dir.scale, {"actors": args.count})
    asyncio.run(_until_there(run_dir, args.count, args.timeout))
    return 0


async def _until_there(run_dir: RunDir, count: int, timeout_s: float) -> None:
    """Wait until `count` actors serve, printing their phases. Raises `FieldError` if the run ends meanwhile."""
    import asyncio

    from pipelinerl.local.following import ask_actor
    from pipelinerl.local.processes import running_pids
    from pipelinerl.local.progress import phase_of
    from pipelinerl.service.tls import read_certificates

    certificates = read_certificates(run_dir.credentials.tls_dir, "client")
    shown = ""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                actors = sorted(name for name in running_pids(run_dir) if name.startswith("actor-"))
                states = await asyncio.gather(*(ask_actor(run_dir.address(name), certificates) for name in actors))
                phases = dict(zip(actors, map(phase_of, states), strict=True))
                line = ", ".join(f"{name} {phase}" for name, phase in phases.items()) or "no actors"
                if line != shown:
                    shown = line
                    print(line, file=sys.stderr, flush=True)
                if len(phases) == count and all(phase == "serving" for phase in phases.values()):
                    return
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise ServiceError(
            f"{counted(count, 'actor')} requested, but not all serve after {timeout_s:g} s: {shown}. "
            "The run goes on; look at its logs"
        ) from None


COMMAND = Command(
    "scale", "change the number of actors of a running local run (in a cluster: kubectl scale)", add_arguments, execute
)
