"""Uploads to a real S3 server that is away, refuses, hangs and dies; models fetched from it; and the weight log in it. Loopback
only.

Run by `make test-storage`, with the server beside the environment and not in it (docs/development.md).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyarrow.fs import FileSelector, FileSystem

from pipelinerl.service.retry import Backoff
from pipelinerl.transfer import stores
from pipelinerl.transfer.stores import ObjectMissing, StoreError, open_store
from pipelinerl.transfer.weight_log import Replica, WeightLog
from services.trainer.checkpoint import store as uploads
from services.trainer.checkpoint.store import LATEST, MANIFEST
from tests.support.machine import free_port, until_logged
from tests.unit.builders import RUN
from tests.unit.test_uploads import fetched, model
from tests.unit.test_weight_log import MIXED, History, content, run_history
from tests.unit.trainer_fakes import training_run

pytest.importorskip("moto", reason="no moto: make test-storage has it")

KEY = "not-the-key-of-anybody"
ROOT = f"s3://models/team/{RUN}/checkpoints"
LARGE = {"config.json": b"{}", "a.safetensors": os.urandom(10_000_000), "b.safetensors": bytes(100_000_000)}


class Server:
    """An S3 server in a process of its own, which forgets everything when it ends."""

    def __init__(self, log: Path) -> None:
        self._log, self.port = log, free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    async def make_bucket(self) -> None:
        """Once it answers."""
        while True:
            request = urllib.request.Request(f"http://127.0.0.1:{self.port}/models", method="PUT")
            try:
                return (await asyncio.to_thread(urllib.request.urlopen, request, timeout=5)).close()
            except OSError:
                await asyncio.sleep(0.05)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def stored() -> set[str]:
    store, root = FileSystem.from_uri(ROOT)
    found = store.get_file_info(FileSelector(root, recursive=True, allow_not_found=True))
    return {info.path.removeprefix(f"{root}/") for info in found if info.is_file}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(tmp_path / "s3.log")
    own = {"ACCESS_KEY_ID": "someone", "SECRET_ACCESS_KEY": KEY, "ENDPOINT_URL": f"http://127.0.0.1:{server.port}"}
    for name, value in {**own, "REGION": "us-east-1", "EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(uploads, "BACKOFF", Backoff(0.05, 0.2))
    yield server
    server.end()


@contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@pytest.mark.timeout(600)
async def test_what_a_server_does_costs_retries_and_a_model_is_there_whole(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    async with training_run(run_dir) as (run, _), asyncio.timeout(500):
        sending = uploads.Uploads("s3://models/team", run_dir, RUN, run.recorder.metrics.uploads)

        async def take(version: int, files: dict[str, bytes]) -> None:
            await sending.take(model(run_dir / "checkpoints" / f"step-{version}", files), version)

        async with sending.running():
            await take(1, {"config.json": b"1"})
            await until_logged(caplog, "Could not connect to server")  # away
            server.start()
            await until_logged(caplog, "NO_SUCH_BUCKET")  # there, and refuses
            await server.make_bucket()
            await sending.all_done()
            assert stored() == {LATEST, f"step-1/{MANIFEST}", "step-1/config.json"}

            await take(2, LARGE)
            while "step-2/a.safetensors" not in await asyncio.to_thread(stored):
                await asyncio.sleep(0.01)
            server.end()  # in the middle of it
            failed = caplog.text.count("trying again")
            await until_logged(caplog, "trying again", failed + 1)
            server.start()
            await server.make_bucket()
            await sending.all_done()
            assert stored() == {LATEST, f"step-2/{MANIFEST}", *(f"step-2/{name}" for name in LARGE)}

            assert server.process is not None
            with stopped(server.process):  # it hangs: whoever takes checkpoints does not
                await take(3, {"config.json": b"3"})
                await take(4, {"config.json": b"4"})
            await sending.all_done()
        assert sending.waiting_s == 0
    assert await asyncio.to_thread(fetched, f"{ROOT}/{LATEST}", tmp_path / "a") == (f"{ROOT}/step-4", {"config.json": b"4"})
    assert (await asyncio.to_thread(fetched, f"{ROOT}/step-2", tmp_path / "b"))[1] == LARGE
    assert KEY not in caplog.text


LOG = "s3://models/team/log"


@pytest.mark.timeout(300)
async def test_the_weight_log_is_read_bit_for_bit_and_no_half_object_is_visible(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.start()
    await server.make_bucket()
    async with open_store(LOG, None) as store, open_store(LOG, None) as reading:  # type: ignore[arg-type]
        await run_history(store, reading, tmp_path, versions=40, seed=21)

        with pytest.raises(ObjectMissing, match="s3://models/team/log: there is no object w/whole"):
            await content(reading, "w/whole")
        whole = os.urandom(30_000_000)
        assert (await store.put("w/whole", [whole[:11], memoryview(whole)[11:]]))[0] == len(whole)
        assert await content(reading, "w/whole") == whole
        for _ in range(2):
            await store.delete("w/whole")
        uploader = f"""
import asyncio, os, signal
from pipelinerl.transfer.stores import open_store
def parts():
    yield os.urandom(30_000_000)
    os.kill(os.getpid(), signal.SIGKILL)
async def main():
    async with open_store({LOG!r}, None) as store:
        await store.put("w/killed", parts())
asyncio.run(main())
"""
        assert subprocess.run([sys.executable, "-c", uploader], check=False).returncode == -signal.SIGKILL
        assert await store.keys("w") == []

        history, reader = History(MIXED, 22), Replica(reading, MIXED, tmp_path / "reader")
        log = WeightLog(store, MIXED, "w", anchor_every=3)
        await reader.bring_to(await log.add(history.version, *history.sent()))
        published = await log.add(history.step(), *history.sent())
        assert server.process is not None
        monkeypatch.setattr(stores, "STALL_S", 2.0)
        with stopped(server.process):  # it hangs
            for call in (log.add(history.step(), *history.sent()), reader.bring_to(published)):
                with pytest.raises(StoreError) as caught:
                    await call
                assert KEY not in str(caught.value)
        monkeypatch.setattr(stores, "STALL_S", 60.0)
        assert (await reader.bring_to(await log.add(history.step(), *history.sent()))).is_file()
        assert reader.version == history.version
        server.end()
        with pytest.raises(StoreError):
            await log.add(history.step(), *history.sent())
