"""The streams of a run that goes on, has ended, or crashed: opened for looking, by a command that was not part of the run.

A command names the folder of a local run, or a NATS server and a run's name; in a pod of a run neither need be given, since the
environment of its service names the NATS server. A local run that goes on has its own nats-server. The stored streams of a
run that has ended are copied and served by a temporary nats-server, so that the run directory stays as it was. Changes no
stream and starts no run.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl.errors import FieldError
from pipelinerl.run_dir import run_name

if TYPE_CHECKING:
    from pipelinerl.bus.jetstream import Bus

OpenStreams = Callable[[], AbstractAsyncContextManager["Bus"]]
"""A connected bus; raises `BusError` when NATS does not answer."""
_STORE = "jetstream"
"""What nats-server calls the folder of its streams."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nats",
        metavar="URL",
        default="",
        help="NATS server of a run elsewhere: nats://host:4222; in a pod of the run: that pod's",
    )
    parser.add_argument("--credentials", metavar="FILE", type=Path, help="file with user:password, or a .creds file")
    parser.add_argument(
        "--tls-dir", metavar="DIR", type=Path, help="folder with ca.crt, and tls.crt and tls.key if the server requires them"
    )


def streams_of(args: argparse.Namespace, run: str) -> OpenStreams | None:
    """Of `run`: on the server that the arguments name, else in the folder, else on the environment's server. None where none of
    them says where they are. Raises `FieldError` for what is no run's name."""
    from pipelinerl.bus.jetstream import connect
    from pipelinerl.bus.protocol import check_run_name
    from pipelinerl.service.settings import StreamsSettings

    if args.nats:
        return partial(connect, args.nats, check_run_name(run, "--run"), credentials=args.credentials, tls_dir=args.tls_dir)
    if args.run_dir and holds_streams(args.run_dir):
        return partial(streams_in_folder, args.run_dir)
    found = StreamsSettings()
    if not found.nats_url:
        return None
    run = check_run_name(run or found.run, "--run")
    return partial(connect, found.nats_url, run, credentials=found.nats_credentials, tls_dir=found.nats_tls_dir)


def holds_streams(run_dir: Path) -> bool:
    """Whether it is the folder of a run on this machine, which keeps its streams there."""
    return (run_dir / "nats" / _STORE).is_dir()


@asynccontextmanager
async def streams_in_folder(folder: Path) -> AsyncIterator[Bus]:
    """A connected bus. Raises `FieldError` when the folder does not say where they are."""
    import asyncio
    import json
    import shutil
    import tempfile

    from pipelinerl.bus.jetstream import connect
    from pipelinerl.bus.permissions import ADMIN
    from pipelinerl.local.credentials import Credentials
    from pipelinerl.local.nats import NatsServer
    from pipelinerl.local.processes import living_names
    from pipelinerl.run_dir import RunDir

    run, run_dir = run_name(folder), RunDir(folder, "")
    credentials = run_dir.credentials
    with ExitStack() as stack:
        if living_names(run_dir):
            file = run_dir.address("nats")
            try:
                url = str(json.loads(file.read_bytes())["url"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                fix = f"does not say where the run's nats-server is: {error!r}"
                raise FieldError("RUN_DIR", str(file), fix) from error
        else:
            copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipelinerl-streams-")))
            await asyncio.to_thread(shutil.copytree, run_dir.nats_store / _STORE, copy / _STORE)
            credentials = Credentials(copy / "secrets")
            url = stack.enter_context(NatsServer(copy, extra={"authorization": credentials.make(run)})).url
        async with connect(url, run, credentials=credentials.nats(ADMIN)) as bus:
            yield bus
