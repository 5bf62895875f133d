"""Calls to the Kubernetes API through the official asyncio client, with bounded times and one typed error. Those of a pod are
here, with its ServiceAccount; `person` adds those of a person with a kubeconfig.

The trainer's permissions are listed here as data: the chart's Role grants exactly these, and the error of a refusal names the
missing one. Token and CA are read from the files that the kubelet provides. The library reads the token again every minute, and
this client does so at once if the API refuses the token, so that a pod outlives its tokens. Apart from that, the client does
not retry: callers know how urgent a call is.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientResponse

from pipelinerl.errors import PipelineRLError
from pipelinerl.service.retry import Backoff
from pipelinerl.service.settings import TrainerSettings


@dataclass(frozen=True, order=True)
class Permission:
    """One verb on one resource, in the pod's own namespace. `group`: API group; empty = the core group."""

    resource: str
    verb: str
    group: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


LIST_PODS = Permission("pods", "list")
WATCH_PODS = Permission("pods", "watch")
PATCH_CONFIG = Permission("configmaps", "patch")
PATCH_REPORT = Permission("secrets", "patch")
COUNT_ACTORS = Permission("deployments/scale", "get", "apps")
SCALE_ACTORS = Permission("deployments/scale", "patch", "apps")
SCALE_TRAINER = Permission("statefulsets/scale", "patch", "apps")

TRAINER = frozenset({LIST_PODS, WATCH_PODS})
"""Permissions of the trainer, the only service with a token."""
KEEP = (PATCH_CONFIG, COUNT_ACTORS, SCALE_ACTORS)
"""Permissions for every value of `on_completion`, since an earlier end of the run may have scaled its actors to zero."""
COMPLETION = {"keep": KEEP, "release": (*KEEP, PATCH_REPORT, SCALE_TRAINER), "exit": (*KEEP, SCALE_TRAINER)}
"""Further permissions by `on_completion`, each for a single object of the trainer's release."""
_SCALE = {SCALE_ACTORS: "patch_namespaced_deployment_scale", SCALE_TRAINER: "patch_namespaced_stateful_set_scale"}
_MERGE = "application/merge-patch+json"
ASK_RIGHTS = Permission("selfsubjectaccessreviews", "create", "authorization.k8s.io")
"""Every ServiceAccount has this permission unless an administrator removed it."""
_GROUPS = {"apps": "AppsV1Api", ASK_RIGHTS.group: "AuthorizationV1Api"}


class KubeError(PipelineRLError):
    """The API refused, or gave no answer. Attributes: `permission` (what was asked for), `status` (of HTTP; 0 = no answer),
    `detail` (the server's words or the connection's error)."""

    def __init__(self, permission: Permission, status: int, detail: object) -> None:
        self.permission, self.status, self.detail = permission, status, str(detail)[:DETAIL_CHARACTERS]
        answer = f"status {status}" if status else "no answer"
        fix = ""
        if status == 401:
            fix = ". The API does not accept the account's token"
        elif status == 403:
            fix = (
                f'. Bind the account to a Role with apiGroups ["{permission.group}"], resources '
                f"[{permission.resource}], verbs [{permission.verb}]"
            )
        super().__init__(f"cannot {permission}: {answer}: {self.detail}{fix}")

    @property
    def denied(self) -> bool:
        """True if the API will refuse again until somebody changes a Role or a token."""
        return self.status in (401, 403)


@dataclass(frozen=True)
class KubeBackoff(Backoff):
    """Delays between attempts at the API. After a refusal, which lasts until a person changes something, the delay is
    `denied_s`. `failures` is the number of failures in a row, including the present one."""

    first_s: float = 0.5
    most_s: float = 30.0
    denied_s: float = 300.0

    def after(self, error: Exception, failures: int) -> float:
        return self.denied_s if isinstance(error, KubeError) and error.denied else self.delay_s(failures)


BACKOFF = KubeBackoff()


@dataclass(frozen=True)
class Pod:
    """State of a pod. `terminating`: its deletion was requested. `deleted`: it is gone, or the selector no longer matches it.
    `cause`: reason for its phase, if the API gives one."""

    name: str
    uid: str
    phase: str = "Running"
    terminating: bool = False
    deleted: bool = False
    cause: str = ""

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], *, deleted: bool = False) -> Pod:
        metadata, status = raw.get("metadata") or {}, raw.get("status") or {}
        return cls(
            name=metadata.get("name", ""),
            uid=metadata.get("uid", ""),
            phase=status.get("phase", ""),
            terminating=bool(metadata.get("deletionTimestamp")),
            deleted=deleted,
            cause=status.get("reason", ""),
        )


REQUEST_S = 5.0
WATCH_S = 300
"""Seconds after which the server ends a watch. The next watch continues from there."""
SILENCE_S = 120.0
"""Seconds without data after which a watch counts as broken. Bookmarks come every minute."""
DETAIL_CHARACTERS = 300


PodChange = tuple[Pod | None, str]
"""A pod's current state (None in a bookmark), and the resource version from which the next watch continues."""


class KubeClient:
    """Access to one namespace with the rights of the pod's ServiceAccount, whose folder has `token` and `ca.crt`. `close` must
    follow the last call. Calls raise `KubeError`."""

    def __init__(self, namespace: str, service_account: Path, *, request_s: float = REQUEST_S) -> None:
        self.namespace = namespace
        self._service_account, self._request_s = service_account, request_s
        self._api: Any = None

    async def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        api, self._api = self._api, None
        if api is not None:
            await api.api_client.close()

    async def patch_config(self, name: str, data: Mapping[str, str | None]) -> dict[str, str]:
        """Set these keys of a ConfigMap, remove those whose value is None, and keep the others. Return all keys and values."""
        body = {"data": dict(data)}
        raw = await self._ask(PATCH_CONFIG, "patch_namespaced_config_map", name=name, body=body, _content_type=_MERGE)
        return dict(raw.get("data") or {})

    async def patch_secret(self, name: str, data: Mapping[str, bytes]) -> None:
        """Set these keys of a Secret, which holds at most 1 MiB, and keep the others."""
        body = {"data": {key: base64.b64encode(value).decode() for key, value in data.items()}}
        await self._ask(PATCH_REPORT, "patch_namespaced_secret", name=name, body=body, _content_type=_MERGE)

    async def count_actors(self, name: str) -> int:
        """Return the wanted replicas of a Deployment."""
        raw = await self._ask(COUNT_ACTORS, "read_namespaced_deployment_scale", name=name)
        return int(raw["spec"].get("replicas", 0))  # the API leaves a zero out

    async def scale(self, permission: Permission, name: str, replicas: int) -> None:
        """Scale the object `name` like `kubectl scale`. `permission`: the one to scale objects of its kind."""
        await self._ask(permission, _SCALE[permission], name=name, body={"spec": {"replicas": replicas}}, _content_type=_MERGE)

    async def may(self, permission: Permission, name: str = "") -> bool:
        """Return whether the ServiceAccount has this permission in its namespace, on object `name` or (empty) on all."""
        resource, _, subresource = permission.resource.partition("/")
        asked = {"namespace": self.namespace, "verb": permission.verb, "group": permission.group, "resource": resource}
        body = {"spec": {"resourceAttributes": asked | {"subresource": subresource, "name": name}}}
        raw = await self._ask(ASK_RIGHTS, "create_self_subject_access_review", body=body)
        return bool((raw.get("status") or {}).get("allowed"))

    async def list_pods(self, selector: str) -> tuple[list[Pod], str]:
        """Return the pods, and the resource version from which a watch can follow their changes."""
        raw = await self._ask(LIST_PODS, "list_namespaced_pod", label_selector=selector)
        return [Pod.from_json(item) for item in raw.get("items") or ()], _resource_version(raw)

    @asynccontextmanager
    async def watch_pods(self, selector: str, resource_version: str) -> AsyncIterator[AsyncIterator[PodChange]]:
        """Yield an iterator over the changes after `resource_version`. The iterator ends when the server ends the watch;
        leaving the block closes the connection. An error with status 410 means that the server no longer has that version: list
        again."""
        with as_kube_error(WATCH_PODS):
            async with asyncio.timeout(self._request_s):
                response = await self._respond(
                    WATCH_PODS,
                    "list_namespaced_pod",
                    label_selector=selector,
                    resource_version=resource_version,
                    watch=True,
                    allow_watch_bookmarks=True,
                    timeout_seconds=WATCH_S,
                    _request_timeout=WATCH_S + SILENCE_S,
                )
        try:
            yield _changes(response)
        finally:
            response.close()

    async def _load_account(self, configuration: Any) -> None:
        """Read the server's address and CA, and the account's token."""
        from kubernetes.aio.config.incluster_config import InClusterConfigLoader

        loader = InClusterConfigLoader(str(self._service_account / "token"), str(self._service_account / "ca.crt"))
        loader.load_and_set(configuration)

    async def _core_api(self) -> Any:
        """Return the `CoreV1Api`, and make it first if there is none."""
        if self._api is None:
            client = await asyncio.to_thread(importlib.import_module, "kubernetes.aio.client")  # takes about a second
            configuration = client.Configuration()
            await self._load_account(configuration)
            self._api = self._api or client.CoreV1Api(client.ApiClient(configuration))
        return self._api

    async def _ask(self, permission: Permission, method: str, **arguments: Any) -> dict[str, Any]:
        with as_kube_error(permission):
            response = await self._respond(permission, method, **arguments, _request_timeout=self._request_s)
            return _parsed(permission, await response.read())

    async def _respond(self, permission: Permission, method: str, **arguments: Any) -> ClientResponse:
        """Return the response to an accepted call. If the token is refused, read its file again and repeat the call once."""
        group = await self._core_api()
        if permission.group:
            from kubernetes.aio import client

            group = getattr(client, _GROUPS[permission.group])(self._api.api_client)
        if permission != ASK_RIGHTS:
            arguments["namespace"] = self.namespace
        call = getattr(group, f"{method}_without_preload_content")
        response: ClientResponse = await call(**arguments)
        if response.status == 401:
            response.release()
            await self._load_account(self._api.api_client.configuration)
            response = await call(**arguments)
        if response.status >= 300:
            body = await response.read()
            raise KubeError(permission, response.status, _message(body) or response.reason or "no reason given")
        return response


def in_cluster(settings: TrainerSettings) -> KubeClient | None:
    """Return a client, or None outside Kubernetes. Sends nothing yet."""
    return KubeClient(settings.pod_namespace, settings.service_account_dir) if settings.pod_namespace else None


async def _changes(response: ClientResponse) -> AsyncIterator[PodChange]:
    while True:
        with as_kube_error(WATCH_PODS):
            async with asyncio.timeout(SILENCE_S):
                line = await response.content.readline()
        if not line:
            return
        if not line.strip():
            continue
        event = _parsed(WATCH_PODS, line)
        kind, raw = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            raise KubeError(WATCH_PODS, int(raw.get("code") or 500), raw.get("message", ""))
        pod = None if kind == "BOOKMARK" else Pod.from_json(raw, deleted=kind == "DELETED")
        yield pod, _resource_version(raw)


def _resource_version(raw: Mapping[str, Any]) -> str:
    return str((raw.get("metadata") or {}).get("resourceVersion", ""))


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
        raise KubeError(permission, 0, str(error) or type(error).__name__) from error


def _parsed(permission: Permission, body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
        if not isinstance(parsed, dict):
            raise TypeError("not an object")
    except (ValueError, TypeError) as error:
        raise KubeError(permission, 0, f"the answer is no JSON object: {error}") from error
    return parsed


def _message(body: bytes) -> str:
    """Return the message of a Status object; empty for anything else."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, TypeError, KeyError):
        return ""


log = logging.getLogger(__name__)

ENDED_PHASES = ("Succeeded", "Failed")


@dataclass(frozen=True)
class PodEnd:
    """The end of a pod. `still_running`: it was told to end, and may run until its grace period is over; if False, its
    processes are gone. `final`: if False, the pod may in fact still run, but without the labels by which it is watched."""

    name: str
    uid: str
    reason: str
    still_running: bool
    final: bool = True


class PodWatch:
    """List pods, follow every change from there, and call `on_end` when a pod is told to end and again when it has ended.

    During an outage, calls are repeated; when a watch has expired, the pods are listed again; after a refusal, the next call
    waits long. `selector`: as for `kubectl get pods -l`. `without`: the consequence of not watching, in words for the log.
    """

    def __init__(self, client: KubeClient, selector: str, on_end: Callable[[PodEnd], None], *, without: str) -> None:
        self._client, self._selector, self._on_end, self._without = client, selector, on_end, without
        self._pods: dict[str, Pod] = {}  # by uid
        self._reported: dict[str, bool] = {}  # by uid: whether it was still running then
        self._resource_version = ""
        self._failures = 0
        self._logged: tuple[object, ...] = ()

    async def run(self) -> None:
        while True:
            try:
                if not self._resource_version:
                    pods, version = await self._client.list_pods(self._selector)
                    listed = {pod.uid for pod in pods}
                    for pod in [pod for uid, pod in self._pods.items() if uid not in listed]:
                        self._deleted(pod)  # it ended between two watches
                    for pod in pods:
                        self._present(pod)
                    self._resource_version = version
                await self._watch()
            except KubeError as error:
                self._failures += 1
                if error.status == 410:
                    self._resource_version = ""
                else:
                    self._log_away(error)
                await asyncio.sleep(BACKOFF.after(error, self._failures))
            else:
                await asyncio.sleep(BACKOFF.first_s)

    async def _watch(self) -> None:
        async with self._client.watch_pods(self._selector, self._resource_version) as changes:
            if self._logged:
                log.info("watching the pods %s again", self._selector)
            self._logged, self._failures = (), 0
            async for pod, version in changes:
                self._resource_version = version or self._resource_version
                if pod is not None:
                    (self._deleted if pod.deleted else self._present)(pod)

    def _present(self, pod: Pod) -> None:
        self._pods[pod.uid] = pod
        ended = pod.phase in ENDED_PHASES
        if not (ended or pod.terminating) or self._reported.get(pod.uid) in (False, not ended):
            return
        why = f" ({pod.cause})" if pod.cause else ""
        reason = f"its pod is in phase {pod.phase}{why}" if ended else "its pod is being deleted"
        self._reported[pod.uid] = not ended
        self._on_end(PodEnd(pod.name, pod.uid, reason, still_running=not ended))

    def _deleted(self, pod: Pod) -> None:
        self._pods.pop(pod.uid, None)
        reported = self._reported.pop(pod.uid, None)
        if reported is not False:
            final = pod.terminating or reported is not None
            reason = "its pod was deleted" if final else "its pod was deleted, or relabelled"
            self._on_end(PodEnd(pod.name, pod.uid, reason, still_running=False, final=final))

    def _log_away(self, error: KubeError) -> None:
        """Warn once, and again when the reason changes. Ignore a first failure to connect, since the next attempt may
        succeed."""
        why = (error.permission, error.status) if error.denied else (error.denied,)
        if why == self._logged or (self._failures == 1 and not error.denied):
            log.debug("%s", error)
            return
        log.warning("%s; %s", error, self._without)
        self._logged = why
