"""Calls to the Kubernetes API with the kubeconfig of a person: objects of a namespace, commands in pods, and ports of pods.

Commands and ports are websockets, which pass through the API server into the pod, where no NetworkPolicy applies.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import ClientError, WSMsgType, WSServerHandshakeError
from aiohttp import ClientWebSocketResponse as Socket

from pipelinerl.errors import ServiceError
from pipelinerl.kube.client import LIST_PODS, KubeClient, KubeError, Permission, as_kube_error

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
_REQUEST_S, _PING_EVERY_S = 30.0, 30.0
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
        super().__init__(namespace, Path(), request_s=_REQUEST_S)
        self.context = context

    async def __aenter__(self) -> PersonClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _load_account(self, configuration: Any) -> None:
        from kubernetes.aio.config import load_kube_config

        await load_kube_config(context=self.context or None, client_configuration=configuration)

    async def items(self, permission: Permission, selector: str) -> list[dict[str, Any]]:
        """Return the objects that this permission lists, as JSON."""
        raw = await self._ask(permission, _LISTS[permission], label_selector=selector)
        return list(raw.get("items") or ())

    async def delete_claim(self, name: str) -> None:
        """Delete a claim. Its volume goes when no pod uses it any more."""
        await self._ask(DELETE_CLAIM, "delete_namespaced_persistent_volume_claim", name=name)

    async def secret(self, name: str) -> dict[str, bytes]:
        raw = await self._ask(GET_SECRET, "read_namespaced_secret", name=name)
        return {key: base64.b64decode(value) for key, value in (raw.get("data") or {}).items()}

    async def execute(self, pod: str, container: str, command: Sequence[str]) -> AsyncIterator[bytes]:
        """Execute a command and yield its output. Raises `ServiceError` if it fails, `KubeError` if the connection ends before
        the command does."""
        errors, options = b"", {"container": container, "command": [*command], "stdout": True, "stderr": True}
        async with self._connect(EXECUTE, "exec", pod, **options) as socket:
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
    async def forwarded(self, pod: str, port: int, refused: list[KubeError]) -> AsyncIterator[str]:
        """Listen on a socket that only this user can reach, and yield its address for gRPC. Each connection leads to a port of
        the pod with this name at that time. Refusals are appended to `refused`."""

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async with self._connect(FORWARD, "portforward", pod, ports=str(port)) as socket:
                    sending = asyncio.create_task(_send(reader, socket))
                    try:
                        await _receive(socket, writer)
                    finally:
                        sending.cancel()
            except (KubeError, ClientError, OSError) as error:  # the caller connects again
                log.debug("the connection to %s ended: %s", pod, error)
                refused.extend([error] if isinstance(error, KubeError) and error.denied else [])
            finally:
                writer.close()

        with tempfile.TemporaryDirectory(prefix="pipelinerl-") as folder:
            server = await asyncio.start_unix_server(pass_on, f"{folder}/socket")
            try:
                yield f"unix:{folder}/socket"
            finally:
                server.close()

    @asynccontextmanager
    async def _connect(self, permission: Permission, what: str, pod: str, **options: Any) -> AsyncIterator[Socket]:
        from kubernetes.aio import client
        from kubernetes.aio.stream import WsApiClient

        async with AsyncExitStack() as stack:
            with as_kube_error(permission):
                async with asyncio.timeout(self._request_s):
                    configuration = (await self._core_api()).api_client.configuration
                    await self._load_account(configuration)  # its token may have expired meanwhile
                    api = client.CoreV1Api(await stack.enter_async_context(WsApiClient(configuration, heartbeat=_PING_EVERY_S)))
                    call = getattr(api, f"connect_get_namespaced_pod_{what}_without_preload_content")
                    try:
                        socket = await stack.enter_async_context(await call(pod, self.namespace, **options))
                    except WSServerHandshakeError as error:
                        detail = "the pod is gone" if error.status == 404 else "the connection was refused"
                        raise KubeError(permission, error.status, detail) from error
            yield socket


async def _send(reader: asyncio.StreamReader, socket: Socket) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(_CHUNK_BYTES):
            await socket.send_bytes(bytes([_DATA]) + data)
        await socket.close()


async def _receive(socket: Socket, writer: asyncio.StreamWriter) -> None:
    begun = set[int]()
    async for message in socket:
        if message.type is not WSMsgType.BINARY or not message.data:
            return
        channel, data = message.data[0], message.data[1:] if message.data[0] in begun else message.data[3:]
        begun.add(channel)
        if channel != _DATA and data:
            log.debug("the port cannot be reached: %s", data.decode(errors="replace"))
            return
        writer.write(data)
        await writer.drain()
