"""`python -m services.trainer.release_test`: test an installed release from the trainer's point of view. `helm test` runs it.

The test runs in its own pod with the trainer's environment, files, volume and ServiceAccount. It leaves nothing behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from pipelinerl.bus.jetstream import connect
from pipelinerl.errors import PipelineRLError, ServiceError
from pipelinerl.kube.client import COMPLETION, LIST_PODS, TRAINER, in_cluster
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.grpc import explained, open_channel
from pipelinerl.service.settings import TrainerSettings, read_settings, split_host_port

ANSWER_S = 15.0
"""Seconds allowed for one call."""
CHECK_S = 60.0
"""Seconds allowed for a whole check. Importing a client can take a long time on a busy node."""
CLOSED_S = 5.0
"""Seconds without an answer after which an address counts as closed. Network policies drop packets silently."""

OBJECTS = {"configmaps": "run", "secrets": "report", "deployments/scale": "actor", "statefulsets/scale": "trainer"}
"""Name suffixes by kind of object. Of each kind, the trainer may access only the object named RELEASE-SUFFIX."""

Check = Callable[[], Awaitable[str]]


async def check_recipe(settings: TrainerSettings) -> str:
    return f"{load_recipe(settings.recipe).name}, run {settings.run}"


async def check_volume(settings: TrainerSettings) -> str:
    """Check that this user can write to the mounted volume claim."""
    folder = next(one for one in settings.run_dir.parents if one.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".release-test-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ServiceError(f"user {os.getuid()} cannot write to {folder}: {error}; check its space and permissions") from error
    return f"{folder} is writable; {shutil.disk_usage(folder).free / 2**30:.1f} GiB free"


async def check_nats(settings: TrainerSettings, credentials: Path | None) -> str:
    """Check that a login (the trainer's or an actor's) works, and that the trainer has created the run's streams."""
    async with connect(
        settings.nats_url,
        settings.run,
        name="release-test",
        credentials=credentials,
        tls_dir=settings.nats_tls_dir,
        connect_timeout_s=ANSWER_S,
    ) as bus:
        prompts, sequences = await bus.prompts_info(), await bus.sequences_info()
    return f"the run's streams exist; {prompts.messages} groups wait, {sequences.messages} sequences are kept"


async def check_http(who: str, host: str, port: int) -> str:
    """Check that a Service resolves and answers on its HTTP port. Other ports are not tried: a ready pod listens on all."""
    from aiohttp import ClientError, ClientSession, ClientTimeout

    url = f"http://{host}:{port}/readyz"
    try:
        async with ClientSession(timeout=ClientTimeout(ANSWER_S)) as session, session.get(url) as response:
            if response.status != 200:
                raise ServiceError(f"{url} answers {response.status}: {(await response.text())[:300]}")
    except (ClientError, OSError) as error:
        why = str(error) or type(error).__name__
        raise ServiceError(f"{url}: {why}; is {who} ready, and does its Service select it?") from error
    return f"{url} answers"


async def check_verifier(address: str, tls_dir: Path | None) -> str:
    """Check that the verifier's Service resolves and answers on its gRPC port, and check the certificates."""
    from grpc import aio
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with open_channel(address, tls_dir) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=ANSWER_S, wait_for_ready=tls_dir is None
            )
        except aio.AioRpcError as error:
            raise ServiceError(f"{address}: {explained(error, tls_dir)}") from error
    return f"{address} serves"


async def check_rights(settings: TrainerSettings) -> str:
    """Ask the API server whether the trainer's ServiceAccount has each permission that it needs. Only listing pods is tried."""
    kube = in_cluster(settings)
    if kube is None:
        return "kubernetesApi.enabled is false: no permissions are needed"
    async with kube:
        pods = await kube.items(LIST_PODS, settings.actor_selector)
        needed = dict.fromkeys(TRAINER, "") | {
            permission: f"{settings.release}-{OBJECTS[permission.resource]}"
            for permission in (COMPLETION[settings.on_completion] if settings.release else ())
        }
        lacking = [f"{one} {name}".strip() for one, name in sorted(needed.items()) if not await kube.may(one, name)]
    if lacking:
        raise ServiceError(
            f"the trainer's ServiceAccount may not {', '.join(lacking)}; bind it to a Role like the chart's (rbac.create)"
        )
    running = sum(pod["status"].get("phase") == "Running" for pod in pods)
    return f"all {len(needed)} permissions are granted; {running} of {len(pods)} actors run"


async def answers(address: str, within_s: float) -> bool:
    """Return whether a connection to host:port can be made. Raises `ServiceError` if the name does not resolve."""
    host, port = split_host_port(address)
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(host, port)
    except socket.gaierror as error:
        raise ServiceError(f"{host}: {error}; is a pod of this Service ready?") from error
    except (TimeoutError, OSError):
        return False
    writer.close()
    return True


async def check_episodes(address: str) -> str:
    if await answers(address, ANSWER_S):
        return f"{address} serves the turns of episodes"
    raise ServiceError(f"{address} takes no connections: `kubectl logs` of the actors says whether they serve episodes")


async def check_policies(closed: str) -> str:
    """Check that this pod cannot reach an address that only actors and the trainer may reach."""
    if not await answers(closed, CLOSED_S):
        return f"{closed} is closed to this pod"
    raise ServiceError(
        f"{closed} answers this pod, though no NetworkPolicy allows that: use a network plugin that enforces policies, or set "
        "networkPolicy.enabled=false and accept that any process that reaches the pods may call them"
    )


def checks(settings: TrainerSettings, options: argparse.Namespace) -> dict[str, Check]:
    """Return the checks that `options` asks for, by name. Those of rights and network policies come last."""
    trainer = split_host_port(settings.rendezvous)[0]
    found: dict[str, Check | None] = {
        "recipe": partial(check_recipe, settings),
        "volume": None if options.no_volume else partial(check_volume, settings),
        "NATS": partial(check_nats, settings, settings.nats_credentials),
        "actor's login to NATS": options.actor_login and partial(check_nats, settings, options.actor_login),
        "trainer's Service": partial(check_http, "the trainer", trainer, settings.http_port),
        "verifier's Service": options.verifier and partial(check_verifier, options.verifier, settings.tls_dir),
        "actor's Service": options.actor and partial(check_http, "an actor", *split_host_port(options.actor)),
        "episodes": options.episodes and partial(check_episodes, options.episodes),
        "rights": partial(check_rights, settings),
        "network policies": options.closed and partial(check_policies, options.closed),
    }
    return {name: check for name, check in found.items() if check}


async def failures(every: dict[str, Check]) -> list[str]:
    """Run all checks, print a line for each, and return the names of failed checks."""
    failed = []
    for name, check in every.items():
        try:
            async with asyncio.timeout(CHECK_S):
                print(f"ok      {name}: {await check()}", flush=True)
        except (PipelineRLError, TimeoutError) as error:
            failed.append(name)
            print(f"FAILED  {name}: {str(error) or f'no answer in {CHECK_S:g} s'}", flush=True)
    return failed


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.trainer.release_test", description=__doc__)
    parser.add_argument("--no-volume", action="store_true", help="skip the volume, which only the trainer's pod may mount")
    parser.add_argument("--actor-login", type=Path, metavar="FILE", help="the actors' user and password for NATS")
    for name, what in (
        ("--verifier", "the verifier's Service and gRPC port"),
        ("--actor", "the actors' Service and HTTP port"),
        ("--episodes", "address at which actors serve the turns of episodes"),
        ("--closed", "address that network policies close to this pod"),
    ):
        parser.add_argument(name, default="", metavar="HOST:PORT", help=what)
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of()
    try:
        settings = read_settings(TrainerSettings)
    except PipelineRLError as error:
        print(f"FAILED  environment: {error}")
        return 1
    failed = asyncio.run(failures(checks(settings, options)))
    print(f"failed: {', '.join(failed)}" if failed else "the release works")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
