"""The streams of a run that goes on, has ended, or crashed: opened for looking, by a command that was not part of the run.

A local run that goes on is asked at its own nats-server. Of one that does not, the stored streams are copied and served by
a nats-server of the moment, so that the run directory stays as it was. It changes no stream and starts no run.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.bus.jetstream import JetStreamBus, connect
from pipelinerl.bus.protocol import check_run_name
from pipelinerl.errors import FieldError
from pipelinerl.local.actors import running_pids
from pipelinerl.local.nats import NatsServer
from pipelinerl.run_dir import RunDir

_STORE = "jetstream"
"""What nats-server calls the folder of its streams."""


@dataclass(frozen=True)
class RunStreams:
    """Where a run's streams are: in the folder of a local run, or on a NATS server under the run's name."""

    run_dir: Path | None = None
    nats_url: str = ""
    run: str = ""
    """Name of the run; of a local run's folder it is read."""
    credentials: Path | None = None
    tls_dir: Path | None = None

    def __post_init__(self) -> None:
        if bool(self.run_dir) == bool(self.nats_url):
            raise FieldError("RUN_DIR", str(self.run_dir or ""), "give the folder of a run, or --nats URL --run NAME")
        if self.nats_url:
            check_run_name(self.run, "--run")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[JetStreamBus]:
        """A connected bus. Raises `FieldError` when the folder holds no streams, `BusError` when NATS does not answer."""
        if self.run_dir is None:
            async with connect(self.nats_url, self.run, credentials=self.credentials, tls_dir=self.tls_dir) as bus:
                yield bus
            return
        folder = RunDir(self.run_dir, run_name(self.run_dir))
        async with _server_url(folder) as url, connect(url, folder.name) as bus:
            yield bus


def holds_streams(run_dir: Path) -> bool:
    """Whether it is the folder of a run on this machine, which keeps its streams there."""
    return (run_dir / "nats" / _STORE).is_dir()


def run_name(run_dir: Path) -> str:
    """What the run in this folder is called: `run.json` says so; without it, the folder's name. Raises `FieldError`."""
    if not run_dir.is_dir():
        raise FieldError("RUN_DIR", str(run_dir), "is no folder")
    try:
        name = json.loads((run_dir / "run.json").read_bytes())["run"]
    except FileNotFoundError:
        name = run_dir.resolve().name
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise FieldError("RUN_DIR", str(run_dir), f"its run.json cannot be read: {error!r}") from error
    return check_run_name(str(name), "RUN_DIR")


@asynccontextmanager
async def _server_url(run_dir: RunDir) -> AsyncIterator[str]:
    if _goes_on(run_dir):
        yield _url_in(run_dir.address("nats"))
        return
    store = run_dir.nats_store / _STORE
    if not store.is_dir():
        raise FieldError("RUN_DIR", str(run_dir.path), "holds no streams of a run; give --nats URL --run NAME")
    with tempfile.TemporaryDirectory(prefix="pipelinerl-streams-") as folder:
        copy = Path(folder)
        await asyncio.to_thread(shutil.copytree, store, copy / _STORE)
        async with NatsServer(copy) as server:
            yield server.url


def _goes_on(run_dir: RunDir) -> bool:
    try:
        running_pids(run_dir)
    except FieldError:
        return False
    return True


def _url_in(file: Path) -> str:
    try:
        return str(json.loads(file.read_bytes())["url"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise FieldError("RUN_DIR", str(file), f"does not say where the run's nats-server is: {error!r}") from error
