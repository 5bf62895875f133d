"""A release of the chart for one run: install it with Helm, watch it, fetch its results, and remove it.

Nothing is removed before every file is here with its size. All texts of pods may quote a model, and callers print them through
`printable`.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pipelinerl.errors import FieldError, PipelineRLError, ServiceError, UserError
from pipelinerl.kube.client import BACKOFF, LIST_PODS, KubeError
from pipelinerl.kube.completion import FAILED, FINISHED
from pipelinerl.kube.person import LIST_CLAIMS, LIST_CONFIGS, PersonClient
from pipelinerl.local.ending import write_report
from pipelinerl.local.following import follow_calls
from pipelinerl.local.progress import Display, RunState
from pipelinerl.service.grpc import open_channel
from pipelinerl.service.lifecycle import EXIT_USER_ERROR
from pipelinerl.service.tls import CA, CERTIFICATE, KEY, Certificates

Object = dict[str, Any]
COMPONENT, INSTANCE = "app.kubernetes.io/component", "app.kubernetes.io/instance"
TRAINER, VALIDATION = "trainer", "validation"
RUNS = f"app.kubernetes.io/part-of=pipelinerl,{COMPONENT}={TRAINER}"
"""Selector of the ConfigMaps and StatefulSets that stand for runs."""
STATE = "-run"
"""End of the name of the ConfigMap with a run's state. The part before it begins the names of the release's objects."""
_LOOK_S = 2.0
_LAST_STEPS_S = 5.0
"""Maximum seconds to wait for the records of the last steps after the end of the run."""
_GRPC_PORT = 50051
_INSTALLS_WITHIN = "15m"
"""Helm waits only for the Job that checks the recipe, whose image may have to be pulled."""
_LEAST_HELM = (3, 14)
_IN_USE = re.compile(r"cannot re-?use a name")


class HelmError(PipelineRLError):
    """Helm failed. The text is its message."""


@dataclass(frozen=True)
class Release:
    """`name` is also the name of the run. `context` of the kubeconfig: empty = the current one."""

    name: str
    namespace: str
    context: str
    client: PersonClient

    @property
    def selector(self) -> str:
        return f"{INSTANCE}={self.name}"

    @property
    def _options(self) -> str:
        return f"-n {self.namespace}" + (f" --context {shlex.quote(self.context)}" if self.context else "")

    @property
    def watching(self) -> str:
        return f"pipelinerl submit --attach {self.name} {self._options}"

    @property
    def removing(self) -> str:
        helm = self._options.replace("--context", "--kube-context")
        return f"helm uninstall {self.name} {helm} && kubectl {self._options} delete pvc -l {self.selector}"

    @property
    def logs(self) -> str:
        return f"kubectl {self._options} logs -l {self.selector},{COMPONENT}={TRAINER} --tail=100"


async def helm(release: Release, *arguments: str, text: str = "") -> str:
    """Return the output of Helm, which gets `text` as input. Raises `HelmError`."""
    context = ["--kube-context", release.context] if release.context else []
    command = ["helm", *arguments, "--namespace", release.namespace, *context]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        output, errors = await process.communicate(text.encode())
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode:
        raise HelmError(errors.decode(errors="replace").strip())
    return output.decode(errors="replace")


async def check_helm(release: Release) -> None:
    """Raise `UserError` unless Helm is there and new enough."""
    fix = "install Helm 3.14 or newer (https://helm.sh/docs/intro/install) and put it on PATH"
    if shutil.which("helm") is None:
        raise UserError(f"helm was not found: {fix}")
    version = (await helm(release, "version", "--short")).strip()
    found = re.match(r"v(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < _LEAST_HELM:
        raise UserError(f"helm is {version}, which is too old: {fix}")


async def check_absent(release: Release) -> None:
    """Raise `FieldError` if a release, a run or claims of this name exist."""
    name = release.name
    try:
        await helm(release, "status", name)
    except HelmError as error:
        if "not found" not in str(error):
            raise
    else:
        fix = f"this release exists; watch it ({release.watching}), remove it ({release.removing}), or give another name"
        raise FieldError("--release", name, fix)
    if claims := [name_of(claim) for claim in await release.client.items(LIST_CLAIMS, release.selector)]:
        fix = f"an earlier release left the claims {', '.join(claims)}, whose run this one would continue; remove them"
        raise FieldError("--release", name, f"{fix} ({release.removing.partition(' && ')[2]}), or give another name")
    for state in await run_states(release.client):
        if (state.get("data") or {}).get("run") == name:
            fix = f"the release {labels_of(state)[INSTANCE]} has a run of this name; give another one"
            raise FieldError("--release", name, fix)


async def run_states(client: PersonClient, selector: str = RUNS) -> list[Object]:
    """Return the ConfigMaps with the state of a run."""
    return [item for item in await client.items(LIST_CONFIGS, selector) if name_of(item).endswith(STATE)]


async def install(
    release: Release, chart: str, files: Sequence[Path], values: Mapping[str, Any], show: Callable[[str], None]
) -> None:
    """Install the chart with `values`, and those of `files` over them, and show meanwhile what it waits for. If that fails,
    remove what was installed, and raise `UserError` with what a pod said, or else `HelmError`."""
    given = [part for file in files for part in ("--values", str(file))]
    arguments = ("install", release.name, chart, "--values", "-", *given, "--timeout", _INSTALLS_WITHIN)
    earlier = {pod["metadata"].get("uid") for pod in await release.client.items(LIST_PODS, release.selector)}
    installing = asyncio.create_task(helm(release, *arguments, text=json.dumps(values)))

    async def reasons() -> list[str]:
        """Return what the pods of this installation wait for, which are that of the Job and later those of the run."""
        pods = await release.client.items(LIST_PODS, release.selector)
        waiting = [(pod, why_not_ready(pod)) for pod in pods if pod["metadata"].get("uid") not in earlier]
        return [f"{name_of(pod)}: {why}" for pod, why in waiting if why]

    try:
        while not installing.done():
            with suppress(KubeError):  # Helm says what is wrong
                show("; ".join(["installing", *await reasons()]))
            await asyncio.wait({installing}, timeout=_LOOK_S)
        installing.result()
    except HelmError as error:
        if _IN_USE.search(str(error)):
            raise
        why = "; ".join(await reasons())
        await remove(release)
        if why:
            raise UserError(f"the run was not accepted, and nothing is left installed: {why}") from error
        raise HelmError(f"nothing is left installed: {error}") from error
    finally:
        installing.cancel()
        await asyncio.wait({installing})


async def remove(release: Release) -> None:
    """Uninstall the release and delete its claims."""
    claims = await release.client.items(LIST_CLAIMS, release.selector)
    try:
        await helm(release, "uninstall", release.name)
    except HelmError as error:
        if "not found" not in str(error):
            raise
    for claim in claims:
        try:
            await release.client.delete_claim(name_of(claim))
        except KubeError as error:
            if error.status != 404:
                raise


# --- what pods say: pure ----------------------------------------------------------------------------------------------


def name_of(item: Object) -> str:
    return str(item["metadata"]["name"])


def labels_of(item: Object) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


def is_ready(pod: Object) -> bool:
    conditions = {one["type"]: one["status"] for one in (pod.get("status") or {}).get("conditions") or ()}
    return conditions.get("Ready") == "True"


def why_not_ready(pod: Object) -> str:
    """Return what the pod waits for, such as `Pending: 0/4 nodes are available: ...`; empty if it is ready or done."""
    status = pod.get("status") or {}
    if is_ready(pod) or status.get("phase") == "Succeeded":
        return ""
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{status.get('phase', 'Pending')}: {condition.get('message') or condition.get('reason', '')}"
    for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        waiting, ended = (container.get("state") or {}).get("waiting"), _ended(container)
        if waiting:
            return ": ".join(filter(None, (waiting.get("reason", "waiting"), waiting.get("message", "").strip())))
        if ended and ended.get("exitCode"):
            return ": ".join(filter(None, (f"exit code {ended['exitCode']}", ended.get("message", "").strip())))
    return "starting" if status.get("phase") == "Running" else str(status.get("phase") or "Pending")


def _ended(container: Object) -> Object | None:
    return (container.get("state") or {}).get("terminated")


def _containers(pod: Object) -> Iterator[Object]:
    yield from (pod.get("status") or {}).get("containerStatuses") or ()


def failure_of(data: Mapping[str, str], trainer: Object | None) -> str | None:
    """Return why the run has failed for good; None if it has not."""
    if data.get("phase") == FAILED:
        return data.get("reason") or "no reason is given"
    for container in _containers(trainer or {}):
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            ended = state.get("terminated") or {}
            if ended.get("exitCode") == EXIT_USER_ERROR:
                return str(ended.get("message") or f"the trainer ended with exit code {EXIT_USER_ERROR}").strip()
    return None


# --- watching ---------------------------------------------------------------------------------------------------------


@dataclass
class Look:
    """A release at one moment. `prefix` begins the names of its objects; `data`: the state of its run."""

    prefix: str
    data: Mapping[str, str]
    pods: Sequence[Object]

    @property
    def trainer(self) -> Object | None:
        return next((pod for pod in self.pods if name_of(pod) == f"{self.prefix}-trainer-0"), None)

    @property
    def process(self) -> tuple[object, ...]:
        """Identifies the trainer's process; empty if it does not serve."""
        if (trainer := self.trainer) is None or not is_ready(trainer):
            return ()
        return trainer["metadata"].get("uid"), *(one.get("restartCount") for one in _containers(trainer))

    def show(self, state: RunState) -> None:
        """Update the display's state with what pods wait for. The trainer itself says what it does once it serves."""
        short = {name_of(pod).removeprefix(f"{self.prefix}-"): pod for pod in self.pods}
        waiting = {name: why_not_ready(pod) for name, pod in short.items() if labels_of(pod).get(COMPONENT) != VALIDATION}
        actors = {name for name, pod in short.items() if labels_of(pod).get(COMPONENT) == "actor"}
        state.actors = {name: waiting[name] or "serving" for name in sorted(actors)}
        counts = {name: sum(one.get("restartCount", 0) for one in _containers(pod)) for name, pod in short.items()}
        state.restarts = Counter({name: count for name, count in counts.items() if count})
        state.total_steps = int(self.data.get("steps") or state.total_steps)
        if not self.process:
            reasons = [f"{name}: {why}" for name, why in sorted(waiting.items()) if why]
            state.phase = "; ".join(reasons) or "waiting for the trainer's pod"


async def look(release: Release) -> Look:
    """Raises `ServiceError` if there is no such release, or if its runs publish no state."""
    found = await run_states(release.client, release.selector)
    if not found:
        raise ServiceError(
            f"no run of a release {release.name} in namespace {release.namespace}: pipelinerl runs lists them "
            "(without kubernetesApi.enabled, a release cannot be watched)"
        )
    pods = await release.client.items(LIST_PODS, release.selector)
    return Look(name_of(found[0]).removesuffix(STATE), found[0].get("data") or {}, pods)


async def watch(release: Release, state: RunState, display: Display, began_s: float) -> Look:
    """Show the run until it is finished. Raises `ServiceError` if it fails or its release is gone, `KubeError` if a right is
    missing. An API server that is away and a trainer that restarts are waited for."""
    current, following, finished_s = await look(release), asyncio.create_task(asyncio.sleep(0)), 0.0
    process: tuple[object, ...] = ()

    def elapsed_s() -> float:
        return time.monotonic() - began_s

    async with release.client.forwarded(lambda: f"{current.prefix}-trainer-0", _GRPC_PORT) as forward:
        try:
            while True:
                try:
                    current = await look(release)
                    current.show(state)
                except KubeError as error:
                    if error.denied:
                        raise
                    state.phase = f"waiting for the Kubernetes API: {error.detail}"
                display.show(state, elapsed_s())
                if (reason := failure_of(current.data, current.trainer)) is not None:
                    raise ServiceError(f"the run failed: {reason}\n  log     {release.logs}\n  remove  {release.removing}")
                if forward.refused:
                    raise forward.refused
                if following.done():
                    following.result()
                if current.process and current.process != process:
                    process = current.process
                    following.cancel()
                    following = asyncio.create_task(_follow(release, current, forward.target, state, elapsed_s))
                if current.data.get("phase") == FINISHED:
                    finished_s = finished_s or elapsed_s()
                    if state.step >= state.total_steps or elapsed_s() - finished_s > _LAST_STEPS_S:
                        return current
                await asyncio.sleep(_LOOK_S)
        finally:
            following.cancel()
            await asyncio.wait({following})


async def _follow(release: Release, seen: Look, target: str, state: RunState, elapsed_s: Callable[[], float]) -> None:
    """Follow the trainer's process over the forwarded port. With TLS, show the trainer its own certificate."""
    volumes = {volume["name"]: volume for volume in (seen.trainer or {})["spec"].get("volumes") or ()}
    certificates = None
    if "tls" in volumes:
        secret = await release.client.secret(volumes["tls"]["secret"]["secretName"])
        certificates = Certificates(secret[CERTIFICATE], secret[KEY], secret[CA])
    soon = [("grpc.max_reconnect_backoff_ms", 5000)]
    async with open_channel(target, certificates, f"{seen.prefix}-trainer", soon) as channel:
        await follow_calls(channel, state, elapsed_s)


# --- fetching ---------------------------------------------------------------------------------------------------------

FILES = ("recipe.yaml", "lineage.json", "metrics.jsonl", "samples.jsonl", "summary.json", "checkpoint")
"""The run's records, of which the report is made, and the folder of the trained model."""
_LIST = """
import json, os, sys
os.chdir(sys.argv[1])
names = [os.path.join(at, name) for top in sys.argv[2:] for at, _, found in os.walk(top) for name in found]
names += [name for name in sys.argv[2:] if os.path.isfile(name)]
print(json.dumps({name: os.path.getsize(name) for name in names if not os.path.islink(name)}))
"""
_TRIES = 10
"""Number of tries in a row that fetch nothing."""


async def fetch(release: Release, seen: Look, folder: Path, show: Callable[[str], None]) -> Path:
    """Fetch records and checkpoint into `folder`, write the report there, and return its path. A file that is here with its
    size is kept, and a part of one is continued. Raises `KubeError` or `ServiceError` if a file cannot be fetched."""
    failures = 0
    while True:
        before = _bytes_in(folder)
        try:
            await _fetch_all(release, seen, folder, show)
            return await asyncio.to_thread(write_report, folder)
        except KubeError as error:
            failures = 1 if _bytes_in(folder) > before else failures + 1
            if error.denied or failures == _TRIES:
                raise
            show(f"fetching again: {error.detail}")
            await asyncio.sleep(BACKOFF.after(error, failures))


async def _fetch_all(release: Release, seen: Look, folder: Path, show: Callable[[str], None]) -> None:
    pod, root = f"{seen.prefix}-trainer-0", run_dir_of(seen.trainer)
    command = ["python", "-I", "-c", _LIST, root, *FILES]
    listed = b"".join([data async for data in release.client.execute(pod, TRAINER, command)])
    sizes = sizes_of(listed)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # noqa: ASYNC240 - nothing else runs meanwhile
    targets = {name: target_of(folder, name) for name in sizes}
    done, total = _bytes_in(folder), sum(sizes.values())
    if (free := shutil.disk_usage(folder).free) < total - done:
        needed = f"the results have {total / 1e6:,.0f} MB"
        raise ServiceError(f"{folder} has {free / 1e6:,.0f} MB free, but {needed}: free some space")
    for name, size in sizes.items():
        target = targets[name]
        if target.is_file() and target.stat().st_size == size:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part")
        with part.open("ab") as file:
            if file.tell() < size:
                async for data in release.client.execute(pod, TRAINER, ["tail", "-c", f"+{file.tell() + 1}", f"{root}/{name}"]):
                    file.write(data)
                    done += len(data)
                    show(f"fetching {name}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")
        if (found := part.stat().st_size) != size:
            part.unlink()
            raise ServiceError(f"{name} has {found:,} bytes instead of {size:,}")
        part.replace(target)


def run_dir_of(trainer: Object | None) -> str:
    """Return the folder of the run in the trainer's pod."""
    for container in ((trainer or {}).get("spec") or {}).get("containers") or ():
        for variable in container.get("env") or ():
            if variable["name"] == "PIPELINERL_RUN_DIR":
                return str(variable["value"])
    raise ServiceError("the trainer's pod is gone, so that its volume cannot be read")


def sizes_of(listed: bytes) -> dict[str, int]:
    """Parse the list of files by name, with their bytes. Raises `ServiceError` if it is none, or lacks the recipe."""
    try:
        sizes = {str(name): int(size) for name, size in json.loads(listed).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ServiceError(f"the trainer's pod lists no files: {error}") from error
    if FILES[0] not in sizes:
        raise ServiceError(f"the folder of the run has no {FILES[0]}")
    return sizes


def target_of(folder: Path, name: str) -> Path:
    """Return where a file of the pod belongs. Raises `ServiceError` for a name that leads out of the folder, or past a link."""
    path = PurePosixPath(name)
    target = folder / path
    is_safe = path.parts and not path.is_absolute() and ".." not in path.parts and "\0" not in name
    if not is_safe or path.parts[0] not in FILES or any((folder / at).is_symlink() for at in (path, *path.parents)):
        raise ServiceError(f"the trainer's pod lists the file {name!r}, which has no place in {folder}")
    return target


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
