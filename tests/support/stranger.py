"""What a process without a run's files tries: to read, forge, give orders, end, flood and delete. With its files it all works.

Each attack returns what it got, true if it worked, and raises where it is refused.
"""

import asyncio
import contextlib
import encodings.idna  # noqa: F401 - for names of hosts: nobody cannot import from everywhere
import json
import math
import multiprocessing
import os
import resource
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import AsyncMock
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import grpc
import nats
import nats.errors
import psutil
import pytest
from nats.js import JetStreamContext

from pipelinerl.bus.protocol import Subjects
from pipelinerl.commands.run_folder import streams_in_folder
from pipelinerl.local.credentials import Credentials
from pipelinerl.local.nats import NAME as NATS
from pipelinerl.run_dir import RunDir
from pipelinerl.service.grpc import open_channel
from pipelinerl.service.settings import read_address, split_host_port
from pipelinerl.v1 import actor_pb2, actor_pb2_grpc, trainer_pb2, trainer_pb2_grpc, verifier_pb2, verifier_pb2_grpc

REFUSED_WITHIN_S = 300.0


BY_NATS: tuple[Callable[[JetStreamContext, Subjects], Awaitable[object]], ...] = (
    lambda server, run: server.get_last_msg(run.sequences_stream, run.sequences),
    lambda server, run: server.publish(run.sequences, b"reward 500"),
    lambda server, run: asyncio.gather(*map(server.delete_stream, run.every_stream)),
)


async def have_rewarded(_: grpc.aio.Channel, __: grpc.aio.Channel, verifier: grpc.aio.Channel) -> object:
    item = verifier_pb2.VerifyItem(sequence_id="s", task="chain_sum", reference_json='{"answer": "1"}', completion_text="#1")
    request = verifier_pb2.VerifyRequest(items=[item])
    return (await verifier_pb2_grpc.VerifierServiceStub(verifier).Verify(request, timeout=REFUSED_WITHIN_S)).results


BY_GRPC: tuple[Callable[..., Awaitable[object]], ...] = (
    lambda actor, *_: actor_pb2_grpc.ActorServiceStub(actor).GetState(actor_pb2.GetStateRequest(), timeout=REFUSED_WITHIN_S),
    lambda _, trainer, __: trainer_pb2_grpc.TrainerServiceStub(trainer).CheckpointNow(
        trainer_pb2.CheckpointNowRequest(), timeout=REFUSED_WITHIN_S
    ),
    have_rewarded,
)


async def by_grpc(run_dir: RunDir, attack: Callable[..., Awaitable[object]], tls_dir: Path | None) -> object:
    targets = [read_address(run_dir.address(name)).grpc for name in ("actor-0", "trainer", "verifier")]
    actor, trainer, verifier = (open_channel(target, tls_dir) for target in targets)
    async with actor, trainer, verifier:
        return await attack(actor, trainer, verifier)


PAGE = ("", "page/history", "page/news", "page/assets/live.js")


def page(run_dir: RunDir, path: str) -> str:
    address, opener = read_address(run_dir.address("trainer")).http, build_opener(ProxyHandler({}))
    return str(opener.open(f"http://{address}/{path}", timeout=REFUSED_WITHIN_S).read().decode())


async def refused_everywhere(run_dir: RunDir, folder: Path) -> None:
    """A stranger knows all addresses, and has credentials that it made itself in `folder`."""
    own = Credentials(folder)
    own.make(run_dir.name)
    url = json.loads(run_dir.address("nats").read_bytes())["url"]
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    options = {"allow_reconnect": False, "connect_timeout": REFUSED_WITHIN_S, "error_cb": AsyncMock(), "tls": trusting}
    for attack in BY_NATS:
        for login in ({}, {"user": "actor", "password": own.nats("actor").read_text().partition(":")[2]}):
            with pytest.raises(nats.errors.Error, match="Authorization Violation"):
                async with await nats.connect(url, **options, **login) as client:
                    await attack(client.jetstream(), Subjects(run_dir.name))
    for attack in BY_GRPC:
        for tls_dir in (None, own.tls_dir):
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await by_grpc(run_dir, attack, tls_dir)
    for key in ("", "x/", "page/", own.page_key.read_text() + "/"):
        for path in PAGE:
            with pytest.raises(HTTPError, match="403"):
                await asyncio.to_thread(page, run_dir, key + path)


async def open_to_the_owner(run_dir: RunDir) -> None:
    """The same requests with the run's own files, but those to NATS, which would end it."""
    for attack in BY_GRPC:
        assert await by_grpc(run_dir, attack, run_dir.credentials.tls_dir), attack
    key = run_dir.credentials.page_key.read_text()
    shown = [await asyncio.to_thread(page, run_dir, f"{key}/{path}") for path in PAGE]
    assert '"completion"' in shown[1]


async def done_to_a_copy(run_dir: RunDir) -> None:
    for attack in BY_NATS:
        async with streams_in_folder(run_dir.path) as bus:
            assert await attack(bus.connection.jetstream(), Subjects(run_dir.name)), attack


def nothing_is_readable_by_others(run_dir: RunDir) -> None:
    secrets = [path for path in (run_dir.path / "secrets").rglob("*") if path.is_file()]
    passwords = [run_dir.credentials.nats(user).read_text().partition(":")[2] for user in ("trainer", "actor", "admin")]
    passwords.append(run_dir.credentials.page_key.read_text())
    assert len(secrets) == 7
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (*secrets, run_dir.nats_store / "nats.conf"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in (run_dir.path, run_dir.path / "secrets", run_dir.nats_store))
    logs = [path.read_bytes() for path in (run_dir.path / "logs").iterdir()]
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                logs.append((process / name).read_bytes())
    assert not [one for one in logs for password in passwords if password.encode() in one]


NOBODY = 65534
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
NOISE = (bytes(8), b"\xff" * 4096, b"GET / HTTP/1.0\r\n\r\n", b"CONNECT {}\r\n")
SILENT = 1100
"""Connections to each process on which nothing is said: more than it may have open files by default."""


@contextlib.contextmanager
def another_user(run_dir: RunDir, beside: Collection[str] = ()) -> Iterator[None]:
    """Connect to every port that asks for a login, say something and stay. Needs root, who can be another user.

    Asserts that the run's processes listen on loopback alone, that only those in the roles of `beside` have other ports, where
    weights and tensors of ranks pass, and that another user gets at none of the run's files, temporary ones included.
    """
    latest = time.monotonic() + REFUSED_WITHIN_S
    while (found := _listeners(run_dir))[1] != set(beside):  # a service listens before it tells where
        assert time.monotonic() < latest, found[1]
        time.sleep(0.1)
    wanted, _, private = found
    (temporary,) = private
    closed = [
        os.path.join(folder, name)
        for top in (temporary, run_dir.path)
        for folder, folders, files in os.walk(top)  # a folder may be renamed or removed meanwhile
        for name in ("", *folders, *files)
    ]
    here, there = multiprocessing.Pipe()
    given = there, wanted, closed
    process = multiprocessing.get_context("spawn").Process(target=_as_nobody, args=given, daemon=True)
    process.start()
    there.close()
    try:
        assert here.poll(REFUSED_WITHIN_S)
        assert here.recv() == (len(wanted), [])
        yield
    finally:
        process.kill()
        process.join()


def _listeners(run_dir: RunDir) -> tuple[list[tuple[int, bytes]], set[str], set[Path]]:
    """Return what to say to which port, the roles of processes with further ports, and folders for temporary files."""
    names = [path.stem for path in run_dir.address(NATS).parent.iterdir()]
    known = {int(json.loads(run_dir.address(NATS).read_bytes())["url"].rpartition(":")[2])}
    for one in (read_address(run_dir.address(name)) for name in names if name != NATS):
        known |= {split_host_port(address)[1] for address in (one.grpc, one.http) if address}
    wanted, unknown, private = list[tuple[int, bytes]](), set[str](), set[Path]()
    services = list[psutil.Process]()
    for pid in json.loads(run_dir.pids.read_bytes()).values():
        with contextlib.suppress(psutil.NoSuchProcess):  # it is being started again
            services += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for service in services:
        with contextlib.suppress(psutil.NoSuchProcess):  # an environment's
            listens = [found.laddr for found in service.net_connections("inet") if found.status == psutil.CONN_LISTEN]
            assert {address.ip for address in listens} <= set(LOOPBACK), service
            environment, command = service.environ(), " ".join(service.cmdline())
            role = "engine" if "VLLM" in command else command.rpartition(".")[2]
            guarded = [address.port for address in listens if address.port in known or role == "actor"]
            silent = [b""] * math.ceil(SILENT / max(1, len(guarded)))
            wanted += [(port, words) for port in guarded for words in (*NOISE, *silent)]
            unknown |= {role for address in listens if address.port not in known}
            private |= {Path(environment["TMPDIR"])} if "TMPDIR" in environment else set()
    return wanted, unknown, private


def _as_nobody(told: Connection, wanted: list[tuple[int, bytes]], closed: list[str]) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    held, opened = [], []
    for port, words in wanted:
        held.append(socket.create_connection(("127.0.0.1", port), REFUSED_WITHIN_S))
        held[-1].sendall(words)
    for path in closed:
        if os.access(path, os.R_OK) or os.access(path, os.W_OK):
            opened.append(path)
    told.send((len(held), opened))
    told.recv()
