"""A verifier as a process or in this one; and its gRPC side without its workers, which does what a test says."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc import aio

from pipelinerl.service.grpc import serve_grpc
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import ServiceAddress, VerifierSettings, read_address
from pipelinerl.v1 import verifier_pb2, verifier_pb2_grpc
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_OK, VerifyRequest, VerifyResponse, VerifyResult
from services.verifier.confinement import children
from services.verifier.server import serve
from tests.support.certificates import serial_of
from tests.support.exposition import metric
from tests.support.machine import ends_within, until

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests/integration"
"""Where the users' code of tests is."""
START_S = 150.0

ITEM = verifier_pb2.VerifyItem(sequence_id="s1", task="t", reference_json="{}")


class ScriptedVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Answers each call with what comes next of the script (a status, an answer, or well if the call's deadline is at least so
    many seconds away, else never), then well: a reward of 1 for each item, for one that is called `late` once that is set.

    `calls` counts; `callers` are the serial numbers of the certificates that were shown.
    """

    def __init__(self, *script: grpc.StatusCode | VerifyResponse | float) -> None:
        self._script = list(script)
        self.calls = 0
        self.callers: list[int] = []
        self.late = asyncio.Event()

    def register(self, server: aio.Server) -> None:
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self, server)

    def serving(self, host: str = "127.0.0.1", port: int = 0, **options: Any) -> AbstractAsyncContextManager[int]:
        return serve_grpc(self.register, [], host, port, **{"stop_grace_s": 0.1} | options)

    async def Verify(self, request: VerifyRequest, context: aio.ServicerContext) -> VerifyResponse:
        self.calls += 1
        shown = context.auth_context().get("x509_pem_cert", [])
        self.callers += [serial_of(certificate.decode()) for certificate in shown]
        match self._script.pop(0) if self._script else None:
            case grpc.StatusCode() as code:
                await context.abort(code, "as the script says")
            case VerifyResponse() as response:
                return response
            case float(seconds):
                if context.time_remaining() < seconds:
                    await asyncio.Event().wait()  # until the deadline ends the call
        if request.items[0].sequence_id == "late":
            await self.late.wait()
        ids = [item.sequence_id for item in request.items]
        return VerifyResponse(results=[VerifyResult(sequence_id=one, status=VERIFY_STATUS_OK, reward=1.0) for one in ids])


async def sample(address: ServiceAddress, name: str) -> float:
    """One sample by its name without prefix, with labels but the run's; 0 when it is not there yet."""
    return await asyncio.to_thread(metric, address.http, f"pipelinerl_verifier_{name}")


class Verifier:
    """A running verifier and what it wrote."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process, self._folder = process, folder

    @property
    def address(self) -> ServiceAddress:
        return read_address(self._folder / "address.json")

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def wait_until_serving(self) -> Verifier:
        deadline_s = time.monotonic() + START_S
        while not (self._folder / "address.json").exists():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.02)  # a file of another process: nothing to wait on
        return self


@contextmanager
def verifier(folder: Path, data: dict[str, Any], **environment: object) -> Iterator[Verifier]:
    """Starts `python -m services.verifier` and ends it. `environment`: settings, without their prefix."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(data))
    settings = {"RUN": "test", "RECIPE": folder / "recipe.yaml", "INSTANCE": "verifier-0", "WORKERS": 2}
    settings |= {"ADDRESS_FILE": folder / "address.json"} | {name.upper(): value for name, value in environment.items()}
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "SECRET_TOKEN": "hunter2"}
    env = {**os.environ, **own, **{f"PIPELINERL_{name}": str(value) for name, value in settings.items()}}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "services.verifier"], cwd=ROOT, env=env, stderr=log)
    try:
        yield Verifier(process, folder)
        workers = children(process.pid)
    finally:
        process.kill()
        process.wait()
    assert [worker for worker in workers if not ends_within(worker, START_S)] == [], "workers outlived their verifier"


@asynccontextmanager
async def serving(folder: Path, data: dict[str, Any], **settings: Any) -> AsyncIterator[ServiceAddress]:
    """The same in this process, which costs less than one of its own. Workers look for modules where this process does."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(data))
    where = {"run": "test", "recipe": folder / "recipe.yaml", "instance": "verifier-0", "workers": 1}
    address, stop = folder / "address.json", asyncio.Event()
    given = VerifierSettings(**(where | {"address_file": address} | settings))
    task = asyncio.create_task(serve(given, stop, LogContext("test", "verifier", "verifier-0")))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(HERE)
        try:
            await until(lambda: address.exists() or task.done())
            if task.done():
                await task
            yield read_address(address)
        finally:
            stop.set()
            await task
