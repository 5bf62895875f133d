"""Calls to the Kubernetes API through the official asyncio client, with time limits and one type of error.

`KubeClient` has the rights of a pod's ServiceAccount, `PersonClient` those of a person's kubeconfig. The chart's Role grants
exactly `TRAINER` and one entry of `COMPLETION`. The library reads the pod's token again every minute. If the API refuses the
token, this client reads it and repeats the call once. It repeats calls after other errors only if opened with `insists`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from aiohttp import ClientError, ClientResponse, ClientWebSocketResponse, WSMsgType

from pipelinerl.errors import PipelineRLError, ServiceError
from pipelinerl.service.retry import Backoff, retry_forever
from pipelinerl.service.settings import TrainerSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Permission:
    """One verb on one resource in a namespace. `group`: API group; empty = core. `method`: method of the Python client."""

    resource: str
    verb: str
    group: str = ""
    method: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


LIST_PODS = Permission("pods", "list", method="list_namespaced_pod")
WATCH_PODS = Permission("pods", "watch", method="list_namespaced_pod")
PATCH_CONFIG = Permission("configmaps", "patch", method="patch_namespaced_config_map")
PATCH_REPORT = Permission("secrets", "patch", method="patch_namespaced_secret")
COUNT_ACTORS = Permission("deployments/scale", "get", "apps", "read_namespaced_deployment_scale")
SCALE_ACTORS = Permission("deployments/scale", "patch", "apps", "patch_namespaced_deployment_scale")
SCALE_TRAINER = Permission("statefulsets/scale", "patch", "apps", "patch_namespaced_stateful_set_scale")

TRAINER = frozenset({LIST_PODS, WATCH_PODS})
"""Permissions of the trainer, the only service with a token for the Kubernetes API."""
KEEP = (PATCH_CONFIG, COUNT_ACTORS, SCALE_ACTORS)
"""Permissions for every value of `on_completion`. Any trainer scales up the actors if an earlier end scaled them to zero."""
COMPLETION = {"keep": KEEP, "release": (*KEEP, PATCH_REPORT, SCALE_TRAINER), "exit": (*KEEP, SCALE_TRAINER)}
"""Permissions of the trainer in addition to `TRAINER`, by `on_completion`. The Role limits each to one object, by its name."""
ASK_RIGHTS = Permission("selfsubjectaccessreviews", "create", "authorization.k8s.io", "create_self_subject_access_review")
"""Every ServiceAccount has this permission unless an administrator removed it."""

LIST_CONFIGS = Permission("configmaps", "list", method="list_namespaced_config_map")
LIST_CLAIMS = Permission("persistentvolumeclaims", "list", method="list_namespaced_persistent_volume_claim")
LIST_SETS = Permission("statefulsets", "list", "apps", "list_namespaced_stateful_set")
LIST_JOBS = Permission("jobs", "list", "batch", "list_namespaced_job")
LIST_ACCOUNTS = Permission("serviceaccounts", "list", method="list_namespaced_service_account")
GET_SECRET = Permission("secrets", "get", method="read_namespaced_secret")
EXECUTE = Permission("pods/exec", "get, create", method="connect_get_namespaced_pod_exec")
FORWARD = Permission("pods/portforward", "get, create", method="connect_get_namespaced_pod_portforward")
"""`EXECUTE` and `FORWARD` open a websocket, for which Kubernetes 1.35 and newer require get and create."""
_GROUPS = {"": "CoreV1Api", "apps": "AppsV1Api", "batch": "BatchV1Api", ASK_RIGHTS.group: "AuthorizationV1Api"}
_CHUNK_BYTES = 64 * 1024
_MOST_ERROR_BYTES = 2000
_DATA = 0
"""Number of the websocket channel with the port's data. The first message of each channel begins with the port's number."""


class KubeError(PipelineRLError):
    """The API refused, or gave no answer. Attributes: `permission` (what was asked for), `status` (of HTTP; 0 = no answer),
    `detail` (the server's words or the connection's error)."""

    def __init__(self, permission: Permission, status: int, detail: object) -> None:
        self.permission, self.status, self.detail = permission, status, str(detail)[:DETAIL_CHARACTERS]
        role = f'apiGroups ["{permission.group}"], resources [{permission.resource}], verbs [{permission.verb}]'
        fixes = {401: ". The API does not accept the account's token", 403: f". Bind the account to a Role with {role}"}
        answer = f"status {status}" if status else "no answer"
        super().__init__(f"cannot {permission}: {answer}: {self.detail}{fixes.get(status, '')}")

    @property
    def denied(self) -> bool:
        """True if the API will refuse again until somebody changes a Role or a token."""
        return self.status in (401, 403)


BACKOFF = Backoff(first_s=0.5, most_s=30.0)
Object = dict[str, Any]
"""An object of the API, as JSON."""


def name_of(item: Object) -> str:
    return str(item["metadata"]["name"])


REQUEST_S, PERSON_S = 5.0, 30.0
"""Time limits of a call from a pod and of a call from a user's machine. A dead websocket is noticed after 1.5 · `PERSON_S`."""
WATCH_S = 60
"""Seconds after which the server ends a watch. The pods are then listed again, which also finds what a broken watch missed."""
DETAIL_CHARACTERS = 300


class KubeClient:
    """Access to one namespace with the rights of the pod's ServiceAccount, whose folder has `token` and `ca.crt`. As a context
    manager, it closes its connections at the end. A failed call raises `KubeError`. With `insists`, all calls but watches are
    repeated until they succeed."""

    def __init__(self, namespace: str, service_account: Path, *, request_s: float = REQUEST_S, insists: bool = False) -> None:
        self.namespace = namespace
        self._service_account, self._request_s = service_account, request_s
        self._is_repeated = lambda error: insists and isinstance(error, KubeError)
        self._api: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._api is not None:
            await self._api.close()

    async def patch_config(self, name: str, data: Mapping[str, str | None]) -> dict[str, str]:
        """Set these keys of a ConfigMap, remove those whose value is None, and keep the others. Return all keys and values."""
        return (await self.call(PATCH_CONFIG, name=name, body={"data": {**data}})).get("data") or {}

    async def scale(self, permission: Permission, name: str, replicas: int | None = None) -> int:
        """Scale the object `name` to `replicas`; None = only read its scale. Return its number of replicas."""
        body = {} if replicas is None else {"body": {"spec": {"replicas": replicas}}}
        return int((await self.call(permission, name=name, **body))["spec"].get("replicas", 0))  # the API leaves a zero out

    async def may(self, permission: Permission, name: str = "") -> bool:
        """Return whether the ServiceAccount has this permission in its namespace, for the object `name` or, if "", for all."""
        resource, _, subresource = permission.resource.partition("/")
        asked = {"namespace": self.namespace, "verb": permission.verb, "group": permission.group, "resource": resource}
        body = {"spec": {"resourceAttributes": asked | {"subresource": subresource, "name": name}}}
        return bool(((await self.call(ASK_RIGHTS, body=body)).get("status") or {}).get("allowed"))

    async def items(self, permission: Permission, selector: str) -> list[Object]:
        """Return the objects of the kind `permission.resource` whose labels match `selector`."""
        return (await self.call(permission, label_selector=selector)).get("items") or []

    async def watch_pods(self, selector: str, resource_version: str) -> ClientResponse:
        """Return the open response of a watch. Each line is one change after `resource_version`. The caller closes it."""
        options = {"label_selector": selector, "resource_version": resource_version, "watch": True, "timeout_seconds": WATCH_S}
        with as_kube_error(WATCH_PODS):
            async with asyncio.timeout(self._request_s):  # the library's own limit ends a watch on a dead connection
                return await self._respond(WATCH_PODS, **options, _request_timeout=WATCH_S + self._request_s)

    async def _load_account(self, configuration: Any) -> None:
        from kubernetes.aio.config.incluster_config import InClusterConfigLoader

        loader = InClusterConfigLoader(str(self._service_account / "token"), str(self._service_account / "ca.crt"))
        loader.load_and_set(configuration)

    async def _connection(self) -> Any:
        if self._api is None:
            client = await asyncio.to_thread(importlib.import_module, "kubernetes.aio.client")  # takes about a second
            configuration = client.Configuration()
            await self._load_account(configuration)
            self._api = self._api or client.ApiClient(configuration)
        return self._api

    async def call(self, permission: Permission, **arguments: Any) -> Object:
        """Make the call that `permission` allows, and return the answer. `arguments`: those of `permission.method`. If the
        verb is patch, `body` is merged into the object `name`."""
        if permission.verb == "patch":
            arguments["_content_type"] = "application/merge-patch+json"

        async def once() -> Object:
            with as_kube_error(permission):
                response = await self._respond(permission, **arguments, _request_timeout=self._request_s)
                answer: Object = json.loads(await response.read())
                return answer

        return await retry_forever(once, "call the API", retried=self._is_repeated, backoff=BACKOFF)

    async def _respond(self, permission: Permission, **arguments: Any) -> ClientResponse:
        """Return the response to an accepted call. If the token is refused, read its file again and repeat the call once."""
        api = await self._connection()
        from kubernetes.aio import client

        call = getattr(getattr(client, _GROUPS[permission.group])(api), f"{permission.method}_without_preload_content")
        if permission != ASK_RIGHTS:
            arguments["namespace"] = self.namespace
        response: ClientResponse = await call(**arguments)
        if response.status == 401:
            response.release()
            await self._load_account(api.configuration)
            response = await call(**arguments)
        if response.status >= 300:
            body, detail = await response.read(), ""
            with suppress(ValueError, TypeError, KeyError):  # not a Status object
                detail = str(json.loads(body)["message"])
            raise KubeError(permission, response.status, detail or response.reason or "no reason given")
        return response


def in_cluster(settings: TrainerSettings, *, insists: bool = False) -> KubeClient | None:
    """Return a client; None outside Kubernetes, or if the chart does not let the trainer use the API. Sends nothing yet."""
    return KubeClient(settings.pod_namespace, settings.service_account_dir, insists=insists) if settings.pod_namespace else None


class PersonClient(KubeClient):
    """Access to one namespace with a `context` of the kubeconfig (empty = the current one). Commands and ports of pods are
    reached by websockets through the API server, to which no NetworkPolicy applies."""

    def __init__(self, namespace: str, context: str = "") -> None:
        super().__init__(namespace, Path(), request_s=PERSON_S)
        self.context = context

    async def _load_account(self, configuration: Any) -> None:
        from kubernetes.aio.config import load_kube_config

        await load_kube_config(context=self.context or None, client_configuration=configuration)

    async def delete(self, listing: Permission, selector: str) -> None:
        """Delete each object that `listing` finds. Kubernetes deletes their dependents later, and a PVC once no pod uses it."""
        deletion = replace(listing, verb="delete", method=listing.method.replace("list", "delete", 1))
        for item in await self.items(listing, selector):
            await self.call(deletion, name=name_of(item), propagation_policy="Background")

    async def execute(self, pod: str, container: str, command: Sequence[str]) -> AsyncIterator[bytes]:
        """Execute a command and yield its output. Raises `ServiceError` if it fails, `KubeError` if the connection ends before
        the command does."""
        from kubernetes.aio.stream.ws_client import ERROR_CHANNEL, STDERR_CHANNEL, STDOUT_CHANNEL

        errors, options = b"", {"container": container, "command": [*command], "stdout": True, "stderr": True}
        async with self._connect(EXECUTE, pod, **options) as socket:
            async for message in socket:
                if message.type is not WSMsgType.BINARY or not message.data:
                    break
                channel, data = message.data[0], message.data[1:]
                if channel == STDOUT_CHANNEL and data:
                    yield data
                elif channel == STDERR_CHANNEL:
                    errors = (errors + data)[-_MOST_ERROR_BYTES:]
                elif channel == ERROR_CHANNEL:
                    ended = json.loads(data)
                    if ended.get("status") == "Success":
                        return
                    said = errors.decode(errors="replace").strip() or ended.get("message", "")
                    raise ServiceError(f"{command[0]} failed in pod {pod}: {said}")
        raise KubeError(EXECUTE, 0, "the connection ended")

    @asynccontextmanager
    async def forwarded(self, pod: str, port: int, refused: list[KubeError]) -> AsyncIterator[str]:
        """Listen on a socket that only this user can reach, and yield its address for gRPC. Each connection leads to `port`
        of the pod that has this name at that time. Errors with status 401 or 403 are appended to `refused`."""

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async with self._connect(FORWARD, pod, ports=str(port)) as socket, asyncio.TaskGroup() as tasks:
                    sending = tasks.create_task(_send(reader, socket))
                    await _receive(socket, writer)
                    sending.cancel()
            except* (KubeError, ClientError, OSError) as ended:  # the caller connects again
                log.debug("the connection to %s ended: %s", pod, ended.exceptions)
                refused.extend(error for error in ended.exceptions if isinstance(error, KubeError) and error.denied)
            finally:
                writer.close()

        with tempfile.TemporaryDirectory(prefix="pipelinerl-") as folder:
            server = await asyncio.start_unix_server(pass_on, f"{folder}/socket")
            try:
                yield f"unix:{folder}/socket"
            finally:
                server.close()

    @asynccontextmanager
    async def _connect(self, permission: Permission, pod: str, **options: Any) -> AsyncIterator[ClientWebSocketResponse]:
        from kubernetes.aio import client
        from kubernetes.aio.stream import WsApiClient

        async with AsyncExitStack() as stack:
            with as_kube_error(permission):
                async with asyncio.timeout(self._request_s):
                    configuration = (await self._connection()).configuration
                    await self._load_account(configuration)  # its token may have expired meanwhile
                    api = client.CoreV1Api(await stack.enter_async_context(WsApiClient(configuration, heartbeat=PERSON_S)))
                    call = getattr(api, f"{permission.method}_without_preload_content")
                    socket = await stack.enter_async_context(await call(pod, self.namespace, **options))
            yield socket


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
        channel, data = message.data[0], message.data[1:] if message.data[0] in begun else message.data[3:]
        begun.add(channel)
        if channel != _DATA and data:
            raise KubeError(FORWARD, 0, data.decode(errors="replace"))
        writer.write(data)
        await writer.drain()


@contextmanager
def as_kube_error(permission: Permission) -> Iterator[None]:
    """Convert errors of the libraries to `KubeError`."""
    try:
        yield
    except KubeError:
        raise
    except Exception as error:
        from kubernetes.aio.client.exceptions import OpenApiException
        from kubernetes.aio.config.config_exception import ConfigException

        if not isinstance(error, ClientError | OSError | ConfigException | OpenApiException | ValueError):
            raise
        status = getattr(error, "status", 0)  # of a refused websocket
        refusal = "the pod is gone" if status == 404 else "the connection was refused"
        raise KubeError(permission, status, refusal if status else str(error) or type(error).__name__) from error


async def _changes(response: ClientResponse) -> AsyncIterator[tuple[str, Object]]:
    """Yield the kind of each change and the changed object's new state, until the watch ends or breaks."""
    with suppress(KubeError), as_kube_error(WATCH_PODS):
        async for line in response.content:
            event = json.loads(line)
            if event["type"] == "ERROR":  # such as an expired resource version
                return
            yield event["type"], event["object"]


ENDED_PHASES = ("Succeeded", "Failed")


@dataclass(frozen=True)
class PodEnd:
    """The end of a pod. `still_running`: the API asked the pod to end, and it may run until its grace period is over. `final`:
    False if the pod may only have lost the watched labels, and still run. If neither applies, its processes are gone."""

    name: str
    uid: str
    reason: str
    still_running: bool
    final: bool = True


class PodWatch:
    """List pods, follow every later change, and call `on_end` when a pod begins to terminate and again when it has ended. After
    an error, begin again. `selector`: as for `kubectl get pods -l`. `without`: the consequence of not watching, for the log."""

    def __init__(self, client: KubeClient, selector: str, on_end: Callable[[PodEnd], None], *, without: str) -> None:
        self._client, self._selector, self._on_end = client, selector, on_end
        self._action = f"watch the pods {selector} ({without})"
        self._pods: dict[str, tuple[Object, bool | None]] = {}  # by uid; whether it still ran when its end was reported

    async def run(self) -> None:
        while True:
            response = await retry_forever(
                self._open, self._action, retried=lambda error: isinstance(error, KubeError), backoff=BACKOFF
            )
            with closing(response):
                async for kind, pod in _changes(response):
                    self._changed(pod, is_gone=kind == "DELETED")
            await asyncio.sleep(BACKOFF.first_s)

    async def _open(self) -> ClientResponse:
        found = await self._client.call(LIST_PODS, label_selector=self._selector)
        listed = {pod["metadata"]["uid"] for pod in found.get("items") or ()}
        for pod in [pod for uid, (pod, _) in self._pods.items() if uid not in listed]:
            self._changed(pod, is_gone=True)  # it ended between two watches
        for pod in found.get("items") or ():
            self._changed(pod)
        return await self._client.watch_pods(self._selector, found["metadata"]["resourceVersion"])

    def _changed(self, pod: Object, *, is_gone: bool = False) -> None:
        uid, status = pod["metadata"]["uid"], pod.get("status") or {}
        _, reported = self._pods.pop(uid, (pod, None))
        running = not is_gone and status.get("phase") not in ENDED_PHASES
        ending = "deletionTimestamp" in pod["metadata"] or reported is not None
        is_new = (ending or not running) and reported not in (False, running)
        if not is_gone:
            self._pods[uid] = (pod, running if is_new else reported)
        if is_new:
            why = f" ({status['reason']})" if status.get("reason") else ""
            reason = "is being deleted" if running else "was deleted" if is_gone else f"is in phase {status['phase']}{why}"
            final = ending or not is_gone
            reason += "" if final else ", or relabelled"
            self._on_end(PodEnd(name_of(pod), uid, f"its pod {reason}", still_running=running, final=final))
