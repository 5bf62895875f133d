"""Calls to the Kubernetes API with the kubeconfig of a person: objects of a namespace, commands in pods, and ports of pods.

Commands and ports are websockets, which pass through the API server into the pod, where no NetworkPolicy applies.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientWebSocketResponse, WSMsgType, WSServerHandshakeError

from pipelinerl.errors import ServiceError
from pipelinerl.kube.client import LIST_PODS, KubeClient, KubeError, Permission

log = logging.getLogger(__name__)

LIST_CONFIGS, LIST_CLAIMS = Permission("configmaps", "list"), Permission("persistentvolumeclaims", "list")
LIST_SETS = Permission("statefulsets", "list", "apps")
DELETE_CLAIM, GET_SECRET = Permission("persistentvolumeclaims", "delete"), Permission("secrets", "get")
EXECUTE, FORWARD = Permission("pods/exec", "get, create"), Permission("pods/portforward", "get, create")
"""From Kubernetes 1.35 on, a websocket needs both verbs."""
_LISTS = {
    LIST_PODS: "list_namespaced_pod",
    LIST_CONFIGS: "list_namespaced_config_map",
    LIST_CLAIMS: "list_namespaced_persistent_volume_claim",
    LIST_SETS: "list_namespaced_stateful_set",
}
REQUEST_S = 30.0
_CONNECTS_WITHIN_S = 30.0
_PING_EVERY_S = 30.0
"""A dead connection is noticed after one and a half times this."""
_CHUNK_BYTES = 64 * 1024
_MOST_ERROR_BYTES = 2000
_STDOUT, _STDERR, _ERROR = 1, 2, 3
"""Channels of a command: the first byte of each message."""
_DATA = 0
"""Channel of a port. The first message of each channel repeats the port's number."""


class PersonClient(KubeClient):
    """Access to one namespace with a context of the kubeconfig; empty = the current one."""

    def __init__(self, namespace: str, context: str = "") -> None:
        super().__init__(namespace, Path(), request_s=REQUEST_S)
        self._context = context

    async def _load_account(self, configuration: Any) -> None:
        from kubernetes.aio.config import load_kube_config

        await load_kube_config(context=self._context or None, client_configuration=configuration)

    async def items(self, permission: Permission, selector: str) -> list[dict[str, Any]]:
        """Return the objects that this permission lists, as JSON."""
        raw = await self._ask(permission, _LISTS[permission], label_selector=selector)
        return list(raw.get("items") or ())

    async def delete_claim(self, name: str) -> None:
        """Delete a claim, which goes when no pod uses it any more."""
        await self._ask(DELETE_CLAIM, "delete_namespaced_persistent_volume_claim", name=name)

    async def secret(self, name: str) -> dict[str, bytes]:
        raw = await self._ask(GET_SECRET, "read_namespaced_secret", name=name)
        return {key: base64.b64decode(value) for key, value in (raw.get("data") or {}).items()}

    async def execute(self, pod: str, container: str, command: Sequence[str]) -> AsyncIterator[bytes]:
        """Execute a command and yield its output. Raises `ServiceError` if it fails, `KubeError` if the connection ends before
        the command does."""
        errors, options = b"", {"container": container, "command": [*command], "stdout": True, "stderr": True}
        async with self._connect(EXECUTE, "connect_get_namespaced_pod_exec", pod, **options) as socket:
            async for message in socket:
                if message.type is not WSMsgType.BINARY or not message.data:
                    break
                channel, data = message.data[0], message.data[1:]
                if channel == _STDOUT and data:
                    yield data
                elif channel == _STDERR:
                    errors = (errors + data)[-_MOST_ERROR_BYTES:]
                elif channel == _ERROR:
                    ended = json.loads(data)
                    if ended.get("status") == "Success":
                        return
                    said = errors.decode(errors="replace").strip() or ended.get("message", "")
                    raise ServiceError(f"{command[0]} failed in pod {pod}: {said}")
        raise KubeError(EXECUTE, 0, "the connection ended")

    @asynccontextmanager
    async def forwarded(self, pod: Callable[[], str], port: int) -> AsyncIterator[PortForward]:
        """Listen on a socket that only this user can reach. Each connection leads to the port of the pod that `pod()` names."""
        with tempfile.TemporaryDirectory(prefix="pipelinerl-") as folder:
            forward = PortForward(f"unix:{folder}/trainer")
            server = await asyncio.start_unix_server(partial(self._pass_on, forward, pod, port), f"{folder}/trainer")
            try:
                yield forward
            finally:
                server.close()

    async def _pass_on(
        self,
        forward: PortForward,
        pod: Callable[[], str],
        port: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Pass bytes both ways until one side ends. The caller connects again."""
        try:
            async with self._connect(FORWARD, "connect_get_namespaced_pod_portforward", pod(), ports=str(port)) as socket:
                sending = asyncio.create_task(_send(reader, socket))
                try:
                    await _receive(socket, writer)
                finally:
                    sending.cancel()
        except KubeError as error:
            log.debug("%s", error)
            forward.refused = error if error.denied else None
        except (ClientError, OSError) as error:
            log.debug("the connection to %s ended: %s", pod(), error)
        finally:
            writer.close()

    @asynccontextmanager
    async def _connect(
        self, permission: Permission, method: str, pod: str, **options: Any
    ) -> AsyncIterator[ClientWebSocketResponse]:
        from kubernetes.aio import client
        from kubernetes.aio.stream import WsApiClient

        configuration = (await self._core_api()).api_client.configuration
        async with WsApiClient(configuration, heartbeat=_PING_EVERY_S) as api:
            call = getattr(client.CoreV1Api(api), f"{method}_without_preload_content")
            try:
                async with asyncio.timeout(_CONNECTS_WITHIN_S):
                    try:
                        socket = await (await call(pod, self.namespace, **options))
                    except WSServerHandshakeError as error:
                        if error.status != 401:
                            raise
                        await self._load_account(configuration)
                        socket = await (await call(pod, self.namespace, **options))
            except WSServerHandshakeError as error:
                raise KubeError(permission, error.status, "the connection was refused") from error
            except (ClientError, OSError) as error:
                raise KubeError(permission, 0, error) from error
            async with socket:
                yield socket


class PortForward:
    """A forwarded port. `target`: its address for gRPC. `refused`: the error of the newest connection, if it was refused."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.refused: KubeError | None = None


async def _send(reader: asyncio.StreamReader, socket: ClientWebSocketResponse) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(_CHUNK_BYTES):
            await socket.send_bytes(bytes([_DATA]) + data)
        await socket.close()


async def _receive(socket: ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
    begun = set[int]()
    async for message in socket:
        if message.type is not WSMsgType.BINARY or not message.data:
            return
        channel, data = message.data[0], message.data[1:]
        if channel not in begun:
            begun.add(channel)
            data = data[2:]
        if channel != _DATA and data:
            log.debug("the port cannot be reached: %s", data.decode(errors="replace"))
            return
        writer.write(data)
        await writer.drain()
