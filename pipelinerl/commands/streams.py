"""The streams of a run that goes on, has ended, or crashed: opened for looking, by a command that was not part of the run.

A command names the folder of a local run, or a NATS server and a run's name; in a pod of a run neither need be given, since the
environment of its service names the NATS server. A local run that goes on has its own nats-server. The stored streams of a
run that has ended are copied and served by a temporary nats-server, so that the run directory stays as it was. Changes no
stream and starts no run.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl.errors import FieldError

if TYPE_CHECKING:
    from pipelinerl.bus.jetstream import Bus

OpenStreams = Callable[[], AbstractAsyncContextManager["Bus"]]
"""A connected bus; raises `BusError` when NATS does not answer."""
_STORE = "jetstream"
"""What nats-server calls the folder of its streams."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, nargs="?", help="folder of a local run, finished or not"
    )
    add_server_arguments(parser)
    parser.add_argument("--run", metavar="NAME", default="", help="name of that run")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nats",
        metavar="URL",
        default="",
        help="NATS server of a run elsewhere: nats://host:4222; in a pod of the run: that pod's",
    )
    parser.add_argument("--credentials", metavar="FILE", type=Path, help="file with user:password, or a .creds file")
    parser.add_argument(
        "--tls-dir",
        metavar="DIR",
        type=Path,
        help="folder with ca.crt, and tls.crt and tls.key if the server requires them",
    )


def streams_of(args: argparse.Namespace) -> OpenStreams:
    """Raises `FieldError` when neither the arguments nor the environment say where the streams are."""
    folder: Path | None = args.run_dir
    if not args.nats and not (folder and holds_streams(folder)):
        elsewhere = streams_in_environment(args.run or (run_name(folder) if folder else ""))
        if elsewhere is not None:
            return elsewhere
    if bool(folder) == bool(args.nats):
        raise FieldError("RUN_DIR", str(folder or ""), "give the folder of a run, or --nats URL --run NAME")
    if folder:
        return partial(streams_in_folder, folder)
    return streams_on_server(args.nats, args.run, args.credentials, args.tls_dir)


def streams_on_server(url: str, run: str, credentials: Path | None, tls_dir: Path | None) -> OpenStreams:
    """Those of `run`. Raises `FieldError` for what is no run's name; opening them, `BusError` when NATS does not answer."""
    from pipelinerl.bus.jetstream import connect
    from pipelinerl.bus.protocol import check_run_name

    return partial(connect, url, check_run_name(run, "--run"), credentials=credentials, tls_dir=tls_dir)


def streams_in_environment(run: str = "") -> OpenStreams | None:
    """Of `run`, or of the run that the environment names; None where it names no NATS server."""
    from pipelinerl.service.settings import StreamsSettings

    found = StreamsSettings()
    if not found.nats_url:
        return None
    return streams_on_server(found.nats_url, run or found.run, found.nats_credentials, found.nats_tls_dir)


@asynccontextmanager
async def streams_in_folder(run_dir: Path) -> AsyncIterator[Bus]:
    """A connected bus. Raises `FieldError` when the folder holds no streams."""
    from pipelinerl.bus.jetstream import connect

    name = run_name(run_dir)
    async with _server_url(run_dir) as url, connect(url, name) as bus:
        yield bus


def holds_streams(run_dir: Path) -> bool:
    """Whether it is the folder of a run on this machine, which keeps its streams there."""
    return (run_dir / "nats" / _STORE).is_dir()


NAMED_IN = ("run.json", "lineage.json")
"""Files of a run's folder that say what the run is called: of a run on this machine, and the trainer's."""


def run_name(run_dir: Path) -> str:
    """What the run in this folder is called: `NAMED_IN` say so; without them, the folder's name. Raises `FieldError`."""
    import json

    from pipelinerl.bus.protocol import check_run_name

    if not run_dir.is_dir():
        raise FieldError("RUN_DIR", str(run_dir), "is no folder: give the folder of a run")
    name = run_dir.resolve().name
    for file in NAMED_IN:
        try:
            name = json.loads((run_dir / file).read_bytes())["run"]
        except FileNotFoundError:
            continue
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise FieldError("RUN_DIR", str(run_dir), f"its {file} cannot be read: {error!r}") from error
        break
    return check_run_name(str(name), "RUN_DIR")


@asynccontextmanager
async def _server_url(folder: Path) -> AsyncIterator[str]:
    import asyncio
    import json
    import shutil
    import tempfile

    from pipelinerl.local.nats import NatsServer
    from pipelinerl.local.processes import living_names
    from pipelinerl.run_dir import RunDir

    run_dir = RunDir(folder, "")
    if living_names(run_dir):
        file = run_dir.address("nats")
        try:
            url = str(json.loads(file.read_bytes())["url"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            fix = f"does not say where the run's nats-server is: {error!r}"
            raise FieldError("RUN_DIR", str(file), fix) from error
        yield url
        return
    if not holds_streams(folder):
        raise FieldError("RUN_DIR", str(folder), "holds no streams of a run; give --nats URL --run NAME")
    with tempfile.TemporaryDirectory(prefix="pipelinerl-streams-") as copy:
        await asyncio.to_thread(shutil.copytree, run_dir.nats_store / _STORE, Path(copy, _STORE))
        with NatsServer(Path(copy)) as server:
            yield server.url
