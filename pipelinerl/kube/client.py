"""What each service asks of the Kubernetes API, as data: the chart's Roles grant exactly this, and a refusal names it.

It checks nothing: the API server does.

The one error of the Kubernetes boundary: what was asked, what came back, what to do about it.

Runs a blocking call on a thread of its own that nobody has to wait for.

The event loop's own executor is joined when the loop ends, and any executor's threads when the interpreter does: a request
to an API server that does not answer would hold up the end of a service. These threads are daemons.

What is read of a pod, and what its changes say about whether it is still there. Pure.

It does not ask the API; `pod_watch.py` does.

The calls to the Kubernetes API, from inside a pod: each on a thread, bounded in time, with a typed error.

Address, token and CA come from where the kubelet puts them. The official client reads the token again every minute; one that
the API no longer accepts is read again at once, so that a pod outlives its tokens. It does not retry: callers know how
urgent a call is.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pipelinerl.errors import PipelineRLError
from pipelinerl.service.settings import PolicySettings


@dataclass(frozen=True, order=True)
class Permission:
    """One verb on one resource of the pod's own namespace. `api_group` "" is the core group, v1."""

    resource: str
    verb: str
    api_group: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


PATCH_PODS = Permission("pods", "patch")
LIST_PODS = Permission("pods", "list")
WATCH_PODS = Permission("pods", "watch")
CREATE_EVENTS = Permission("events", "create")

ACTOR = frozenset({PATCH_PODS})
TRAINER = frozenset({LIST_PODS, WATCH_PODS, CREATE_EVENTS})


class KubeError(PipelineRLError):
    """The API refused, or gave no answer.

    Attributes: `permission` (what was asked for), `status` (of HTTP; 0 = no answer), `detail` (the server's words or the
    connection's error).
    """

    def __init__(self, permission: Permission, status: int, detail: str) -> None:
        self.permission, self.status, self.detail = permission, status, detail
        answer = f"status {status}" if status else "no answer"
        super().__init__(f"cannot {permission}: {answer}: {detail}{self._fix}")

    @property
    def denied(self) -> bool:
        """It will be refused again, until somebody changes a Role or a token."""
        return self.status in (401, 403)

    @property
    def expired(self) -> bool:
        """The place in the watch that was asked for is no longer kept: list again."""
        return self.status == 410

    @property
    def _fix(self) -> str:
        group = self.permission.api_group or '""'
        if self.status == 403:
            return (
                f". Bind the pod's ServiceAccount to a Role with apiGroups [{group}], resources "
                f"[{self.permission.resource}], verbs [{self.permission.verb}]"
            )
        return ". The API does not accept the ServiceAccount's token" if self.status == 401 else ""


_Result = TypeVar("_Result")


async def in_thread(call: Callable[[], _Result]) -> _Result:
    """What `call` returns or raises. Cancelled, it leaves the call to end by itself, and its result unused."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - the end of a thread: the caller gets it
            args: tuple[Callable[[Any], None], Any] = (future.set_exception, error)
        else:
            args = (future.set_result, result)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, *args)

    threading.Thread(target=run, name="kubernetes", daemon=True).start()
    return await future


ENDED_PHASES = ("Succeeded", "Failed")
Kind = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


@dataclass(frozen=True)
class Pod:
    """`terminating`: its deletion was asked for. `cause`: why its phase is what it is, where the API says so."""

    name: str
    uid: str
    phase: str = "Running"
    terminating: bool = False
    cause: str = ""


@dataclass(frozen=True)
class PodList:
    pods: tuple[Pod, ...]
    resource_version: str
    """Where a watch goes on from."""


@dataclass(frozen=True)
class PodChange:
    """One event of a watch. `pod` None: a bookmark, which only says how far the watch has come."""

    kind: Kind
    pod: Pod | None
    resource_version: str


@dataclass(frozen=True)
class PodEnd:
    """`still_running`: it was told to end and may take its grace period. Otherwise its processes are gone; `final` False: it
    may be, instead, that the pod has lost the labels it is watched by."""

    name: str
    uid: str
    reason: str
    still_running: bool
    final: bool = True


def read_pod(raw: Mapping[str, Any]) -> Pod:
    """Of a pod as the API's JSON has it."""
    metadata, status = raw.get("metadata") or {}, raw.get("status") or {}
    return Pod(
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        phase=status.get("phase", ""),
        terminating=bool(metadata.get("deletionTimestamp")),
        cause=status.get("reason", ""),
    )


class KnownPods:
    """Turns what is listed and watched into ends, each told once: that a pod is told to end, and that it has ended."""

    def __init__(self) -> None:
        self._pods: dict[str, Pod] = {}  # by uid
        self._told: dict[str, bool] = {}  # by uid: whether it was still running when that was told

    def listed(self, pods: Iterable[Pod]) -> list[PodEnd]:
        """All there are: a pod that was known and is not among them was deleted while nobody watched."""
        now = {pod.uid: pod for pod in pods}
        gone = [pod for uid, pod in self._pods.items() if uid not in now]
        return [*self._each(self._deleted(pod) for pod in gone), *self._each(map(self._present, now.values()))]

    def changed(self, change: PodChange) -> list[PodEnd]:
        if change.pod is None:
            return []
        deleted = change.kind == "DELETED"
        return self._each([self._deleted(change.pod) if deleted else self._present(change.pod)])

    def _each(self, ends: Iterable[PodEnd | None]) -> list[PodEnd]:
        return [end for end in ends if end is not None]

    def _present(self, pod: Pod) -> PodEnd | None:
        self._pods[pod.uid] = pod
        end = end_of(pod)
        if end is None or self._told.get(pod.uid) in (False, end.still_running):
            return None
        self._told[pod.uid] = end.still_running
        return end

    def _deleted(self, pod: Pod) -> PodEnd | None:
        self._pods.pop(pod.uid, None)
        told = self._told.pop(pod.uid, None)
        if told is False:
            return None
        final = pod.terminating or told is not None
        reason = "its pod was deleted" if final else "its pod was deleted, or relabelled"
        return PodEnd(pod.name, pod.uid, reason, still_running=False, final=final)


def end_of(pod: Pod) -> PodEnd | None:
    """None: it is there, and nobody has asked for its end."""
    if pod.phase in ENDED_PHASES:
        why = f" ({pod.cause})" if pod.cause else ""
        return PodEnd(pod.name, pod.uid, f"its pod is in phase {pod.phase}{why}", still_running=False)
    if pod.terminating:
        return PodEnd(pod.name, pod.uid, "its pod is being deleted", still_running=True)
    return None


REQUEST_S = 5.0
"""For a call and its answer."""
WATCH_S = 300
"""The server ends a watch then, and the next one goes on where it was."""
SILENCE_S = 120.0
"""A watch that says nothing for so long is taken for broken: bookmarks come every minute."""
DETAIL_CHARACTERS = 300


class KubeClient:
    """One namespace, by the rights of the pod's ServiceAccount. `service_account`: folder with `token` and `ca.crt`."""

    def __init__(self, namespace: str, service_account: Path, *, request_s: float = REQUEST_S) -> None:
        self.namespace = namespace
        self._service_account, self._request_s = service_account, request_s
        self._api: Any = None
        self._making = threading.Lock()

    async def annotate_pod(self, name: str, uid: str, annotations: Mapping[str, str]) -> None:
        """Sets these annotations of the pod; leaves its others. Refused (409) when the pod of that name is another one by
        its `uid` (empty: whichever it is). Raises `KubeError`."""
        metadata: dict[str, Any] = {"annotations": dict(annotations)} | ({"uid": uid} if uid else {})
        await self._ask(
            PATCH_PODS,
            lambda api: api.patch_namespaced_pod(
                name,
                self.namespace,
                {"metadata": metadata},
                _content_type="application/merge-patch+json",
                _preload_content=False,
                _request_timeout=self._request_s,
            ),
        )

    async def create_event(self, event: Mapping[str, Any]) -> None:
        """`event`: a core v1 Event with a name of its own; one that is there already was stored before. Raises `KubeError`."""
        try:
            await self._ask(
                CREATE_EVENTS,
                lambda api: api.create_namespaced_event(
                    self.namespace, dict(event), _preload_content=False, _request_timeout=self._request_s
                ),
            )
        except KubeError as error:
            if error.status != 409:
                raise

    async def list_pods(self, selector: str) -> PodList:
        """Raises `KubeError`."""
        raw = await self._ask(
            LIST_PODS,
            lambda api: api.list_namespaced_pod(
                self.namespace, label_selector=selector, _preload_content=False, _request_timeout=self._request_s
            ),
        )
        pods = tuple(read_pod(item) for item in raw.get("items") or ())
        return PodList(pods, str((raw.get("metadata") or {}).get("resourceVersion", "")))

    @asynccontextmanager
    async def watch_pods(self, selector: str, resource_version: str) -> AsyncIterator[AsyncIterator[PodChange]]:
        """Changes after `resource_version`, as they happen. The iterator ends when the server ends the watch.
        Both raise `KubeError`; leaving the block ends the thread that reads."""
        stream = await in_thread(lambda: self._open_watch(selector, resource_version))
        try:
            yield _changes(stream)
        finally:
            stream.close()

    def _open_watch(self, selector: str, resource_version: str) -> _WatchStream:
        response = self._respond(
            WATCH_PODS,
            lambda api: api.list_namespaced_pod(
                self.namespace,
                label_selector=selector,
                resource_version=resource_version,
                watch=True,
                allow_watch_bookmarks=True,
                timeout_seconds=WATCH_S,
                _preload_content=False,
                _request_timeout=(self._request_s, SILENCE_S),
            ),
        )
        return _WatchStream(response)

    async def _ask(self, permission: Permission, call: Callable[[Any], Any]) -> dict[str, Any]:
        return await in_thread(lambda: _parsed(permission, self._body(permission, call)))

    def _body(self, permission: Permission, call: Callable[[Any], Any]) -> bytes:
        response = self._respond(permission, call)
        return _translated(permission, lambda: response.data)

    def _respond(self, permission: Permission, call: Callable[[Any], Any]) -> Any:
        """The response of a call that was accepted. Blocks. With a token that is refused the call is made again, once, with
        what the file has now."""
        try:
            return _translated(permission, lambda: call(self._configured(fresh=False)))
        except KubeError as error:
            if error.status != 401:
                raise
        return _translated(permission, lambda: call(self._configured(fresh=True)))

    def _configured(self, *, fresh: bool) -> Any:
        """`CoreV1Api`; importing the client takes about a second. Raises `ConfigException` outside a pod."""
        with self._making:
            if self._api is None or fresh:
                self._api = _core_api(self._service_account)
            return self._api


def in_cluster(settings: PolicySettings) -> KubeClient | None:
    """None outside Kubernetes. Calls nobody yet."""
    return KubeClient(settings.pod_namespace, settings.service_account_dir) if settings.pod_namespace else None


class _WatchStream:
    """The lines of one watch. `next_line` blocks on one thread; `close` may be called on any other meanwhile."""

    def __init__(self, response: Any) -> None:
        self._response, self._lines, self._closed = response, _lines(response), False

    def next_line(self) -> bytes | None:
        """None at the end."""
        line = None
        try:
            line = _translated(WATCH_PODS, lambda: next(self._lines, None))
        except KubeError:
            if not self._closed:
                raise
        finally:
            if line is None:
                self._response.close()
        return line

    def close(self) -> None:
        self._closed = True
        with suppress(ValueError, RuntimeError, OSError):  # it has ended by itself
            self._response.shutdown()


async def _changes(stream: _WatchStream) -> AsyncIterator[PodChange]:
    while (line := await in_thread(stream.next_line)) is not None:
        event = _parsed(WATCH_PODS, line)
        kind, raw = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            raise KubeError(WATCH_PODS, int(raw.get("code") or 500), str(raw.get("message", ""))[:DETAIL_CHARACTERS])
        version = str((raw.get("metadata") or {}).get("resourceVersion", ""))
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            yield PodChange(kind, read_pod(raw), version)
        elif kind == "BOOKMARK":
            yield PodChange(kind, None, version)


def _lines(response: Any) -> Iterator[bytes]:
    rest = b""
    for piece in response.stream(amt=None, decode_content=False):
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line for line in whole if line.strip())


def _core_api(service_account: Path) -> Any:
    from kubernetes import client
    from kubernetes.config.incluster_config import InClusterConfigLoader

    configuration = client.Configuration()
    configuration.retries = (
        False  # urllib3 would try three times at once, and the caller's limit would be three times as long
    )
    configuration.keep_alive = True
    loader = InClusterConfigLoader(str(service_account / "token"), str(service_account / "ca.crt"))
    loader.load_and_set(configuration)
    return client.CoreV1Api(client.ApiClient(configuration))


def _translated(permission: Permission, call: Callable[[], _Result]) -> _Result:
    """Raises `KubeError` for all that the client, urllib3 and the sockets raise."""
    from kubernetes.client.exceptions import ApiException, OpenApiException
    from kubernetes.config.config_exception import ConfigException
    from urllib3.exceptions import HTTPError

    try:
        return call()
    except ApiException as error:
        detail = _message(error.body) or _short(error.reason or "no reason given")
        raise KubeError(permission, error.status or 0, detail) from error
    except (HTTPError, OSError, ConfigException, OpenApiException, ValueError) as error:
        raise KubeError(permission, 0, _short(error)) from error


def _parsed(permission: Permission, body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
        if not isinstance(parsed, dict):
            raise TypeError("not an object")
    except (ValueError, TypeError) as error:
        raise KubeError(permission, 0, f"the answer is no JSON object: {_short(error)}") from error
    return parsed


def _message(body: str | bytes | None) -> str:
    """Of a Status object; empty for anything else."""
    try:
        return _short(json.loads(body or "")["message"])
    except (ValueError, TypeError, KeyError):
        return ""


def _short(text: object) -> str:
    return str(text)[:DETAIL_CHARACTERS]
