"""A release of the chart for one run: install it with Helm, watch it, fetch its results, and remove it.

Nothing is removed before every file is here with its size.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from pipelinerl.service.lifecycle import EXIT_USER_ERROR
from pipelinerl.service.logs import printable
from pipelinerl.service.tls import CA, CERTIFICATE, KEY, Certificates

Object = dict[str, Any]
COMPONENT, INSTANCE = "app.kubernetes.io/component", "app.kubernetes.io/instance"
RUNS = f"app.kubernetes.io/part-of=pipelinerl,{COMPONENT}=trainer"
"""Selector of the ConfigMaps with the states of runs, and of the trainers."""
SUBMITTED = "pipelinerl/submitted"
"""Label of what this command has installed, and may remove. Its value identifies the installation."""
STATE = "-run"
"""End of the name of such a ConfigMap. The part before it begins the names of the release's objects."""
_LOOK_S, _LAST_STEPS_S = 2.0, 5.0
"""Seconds between two looks at a release, and for the records of the last steps to arrive after the end."""
_GRPC_PORT = 50051
_RECONNECTS = [("grpc.max_reconnect_backoff_ms", 5000)]
_HELM_FIX = "install Helm 3.14 or newer (https://helm.sh/docs/intro/install) and put it on PATH"


class HelmError(PipelineRLError):
    """Helm failed. The text is its message."""


class HelmNotFound(HelmError):
    """There is no release of this name."""


class Release:
    """A release, whose name is also that of its run, with the commands to tell people. `context` of the kubeconfig: empty = the
    current one."""

    def __init__(self, name: str, namespace: str, context: str, client: PersonClient, output: Path | None = None) -> None:
        self.name, self.namespace, self.client = name, namespace, client
        self.selector = f"{INSTANCE}={name}"
        self.claims = f"{self.selector},{COMPONENT} in (nats,trainer)"
        self.options = ["-n", namespace, *(["--kube-context", context] if context else [])]
        kubectl = f"-n {namespace}" + (f" --context {shlex.quote(context)}" if context else "")
        self.watching = f"pipelinerl submit --attach {name} {kubectl}"
        self.watching += f" --output {shlex.quote(str(output))}" if output else ""
        self.unclaiming = f"kubectl {kubectl} delete pvc -l '{self.claims}'"
        self.removing = f"helm uninstall {name} {shlex.join(self.options)} && {self.unclaiming}"
        self.logs = f"kubectl {kubectl} logs -l {self.selector},{COMPONENT}=trainer --tail=100"


async def helm(release: Release, *arguments: str, text: str = "") -> str:
    """Return the output of Helm, which gets `text` as input. Raises `HelmError`, or `UserError` if there is no Helm."""
    if shutil.which("helm") is None:
        raise UserError(f"helm was not found: {_HELM_FIX}")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("helm", *arguments, *release.options, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        output, errors = await process.communicate(text.encode())
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode:
        message = errors.decode(errors="replace").strip()
        raise (HelmNotFound if "release: not found" in message else HelmError)(message)
    return output.decode(errors="replace")


async def check_helm(release: Release) -> None:
    """Raise `UserError` unless Helm is there and new enough."""
    version = (await helm(release, "version", "--short")).strip()
    found = re.match(r"v(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < (3, 14):
        raise UserError(f"helm is {version}, which is too old: {_HELM_FIX}")


async def check_absent(release: Release) -> None:
    """Raise `FieldError` if a release, a run or claims of this name exist."""
    found, states = [], await run_states(release.client)
    with suppress(HelmNotFound):
        await helm(release, "status", release.name)
        found.append(f"this release exists; watch it ({release.watching}), remove it ({release.removing})")
    if claims := [name_of(claim) for claim in await release.client.items(LIST_CLAIMS, release.claims)]:
        found.append(f"an earlier release left the claims {', '.join(claims)}; remove them ({release.unclaiming})")
    others = [labels_of(state)[INSTANCE] for state in states if (state.get("data") or {}).get("run") == release.name]
    found += [f"the release {other} has a run of this name; remove that" for other in others]
    if found:
        raise FieldError("--release", release.name, f"{found[0]}, or give another name")


async def run_states(client: PersonClient, selector: str = RUNS) -> list[Object]:
    """Return the ConfigMaps with the states of runs."""
    return [item for item in await client.items(LIST_CONFIGS, selector) if name_of(item).endswith(STATE)]


async def install(
    release: Release, chart: str, files: Sequence[Path], values: Mapping[str, Any], show: Callable[[str], None]
) -> None:
    """Install the chart with `values`, and those of `files` over them, and show meanwhile what it waits for. If that fails,
    remove what was installed, and raise `UserError` with what a pod said, or else `HelmError`."""
    given = [part for file in files for part in ("--values", str(file))]
    needed = ("--set", "trainer.onCompletion=keep,kubernetesApi.enabled=true")
    arguments = ("install", release.name, chart, "--values", "-", *given, *needed, "--timeout", "15m")  # for the Job before it
    earlier = {pod["metadata"]["uid"] for pod in await release.client.items(LIST_PODS, release.selector)}
    installing = asyncio.create_task(helm(release, *arguments, text=json.dumps(values)))

    async def reasons() -> list[str]:
        pods = await release.client.items(LIST_PODS, release.selector)
        waiting = {name_of(pod): why_not_ready(pod) for pod in pods if pod["metadata"]["uid"] not in earlier}
        return [f"{name}: {why}" for name, why in waiting.items() if why]

    async def is_own() -> bool:
        """False if Helm has stored nothing, or what somebody else installed at the same time."""
        with suppress(HelmNotFound):
            stored = json.loads(await helm(release, "get", "values", release.name, "--output", "json"))
            return bool((stored.get("commonLabels") or {}).get(SUBMITTED) == values["commonLabels"][SUBMITTED])
        return False

    try:
        while not installing.done():
            with suppress(KubeError):  # Helm says what is wrong
                show("; ".join(["installing", *await reasons()]))
            await asyncio.wait({installing}, timeout=_LOOK_S)
        installing.result()
    except HelmError as error:
        if not await is_own():
            raise
        why = ""
        with suppress(KubeError):
            why = "; ".join(one for one in await reasons() if "-validation" in one.split(":")[0])
        await remove(release)
        said = f"{why}\nHelm says: {error}" if why else str(error)
        raise (UserError if why else HelmError)(f"nothing is left installed: {said}") from error
    finally:
        installing.cancel()
        await asyncio.wait({installing})


async def remove(release: Release) -> None:
    """Uninstall the release and delete its claims."""
    with suppress(HelmNotFound):
        await helm(release, "uninstall", release.name)
    for claim in await release.client.items(LIST_CLAIMS, release.claims):
        await release.client.delete_claim(name_of(claim))


# --- what objects say: pure -------------------------------------------------------------------------------------------


def name_of(item: Object) -> str:
    return str(item["metadata"]["name"])


def labels_of(item: Object) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


def _status(pod: Object, part: str) -> list[Object]:
    return (pod.get("status") or {}).get(part) or []


def is_ready(pod: Object) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in _status(pod, "conditions"))


def why_not_ready(pod: Object) -> str:
    """Return what the pod waits for, such as `Pending: 0/4 nodes are available: ...`; empty if it is ready or done."""
    phase = (pod.get("status") or {}).get("phase") or "Pending"
    if is_ready(pod) or phase == "Succeeded":
        return ""
    told = [(phase, one) for one in _status(pod, "conditions") if one["type"] == "PodScheduled" and one["status"] == "False"]
    for container in (*_status(pod, "initContainerStatuses"), *_status(pod, "containerStatuses")):
        now = container.get("state") or {}
        if waiting := now.get("waiting"):
            told.append((waiting.get("reason", "waiting"), waiting))
        elif code := (now.get("terminated") or {}).get("exitCode"):
            told.append((f"exit code {code}", now["terminated"]))
    reason, found = told[0] if told else ("starting" if phase == "Running" else phase, {})
    return printable(": ".join(filter(None, (reason, found.get("message", "").strip()))))


def failure_of(data: Mapping[str, str], trainer: Object | None) -> str | None:
    """Return why the run has failed for good; None if it has not."""
    if data.get("phase") == FAILED:
        return data.get("reason") or "no reason is given"
    containers = _status(trainer or {}, "containerStatuses")
    states = [one.get(when) or {} for one in containers for when in ("state", "lastState")]
    ends = [ended for state in states if (ended := state.get("terminated") or {}).get("exitCode") == EXIT_USER_ERROR]
    return (ends[0].get("message") or f"the trainer ended with exit code {EXIT_USER_ERROR}").strip() if ends else None


@dataclass
class Look:
    """A release at one moment. `prefix` begins the names of its objects; `data`: the state of its run; `uid`: identifies this
    installation of the release."""

    prefix: str
    data: Mapping[str, str]
    pods: Sequence[Object]
    was_submitted: bool = True
    uid: str = ""

    @property
    def is_finished(self) -> bool:
        """True if the present trainer says that the run is finished. The one before an upgrade does not count."""
        revision = labels_of(self.trainer or {"metadata": {}}).get("controller-revision-hash", "")
        return self.data.get("phase") == FINISHED and self.data.get("revision", revision) == revision

    @property
    def trainer(self) -> Object | None:
        return next((pod for pod in self.pods if name_of(pod) == f"{self.prefix}-trainer-0"), None)

    @property
    def process(self) -> tuple[object, ...]:
        """Identifies the trainer's process; empty if it does not serve."""
        if (trainer := self.trainer) is None or not is_ready(trainer):
            return ()
        return trainer["metadata"]["uid"], *(one.get("restartCount") for one in _status(trainer, "containerStatuses"))

    def update(self, state: RunState) -> None:
        """Update the display's state with what pods wait for. The trainer itself says what it does once it serves."""
        own = [pod for pod in self.pods if labels_of(pod).get(COMPONENT) != "validation"]
        pods = {name_of(pod).removeprefix(f"{self.prefix}-"): pod for pod in own}
        waiting = {name: why_not_ready(pod) for name, pod in sorted(pods.items())}
        state.actors = {
            name: why or "serving" for name, why in waiting.items() if labels_of(pods[name]).get(COMPONENT) == "actor"
        }
        counts = {name: sum(one["restartCount"] for one in _status(pod, "containerStatuses")) for name, pod in pods.items()}
        state.restarts = Counter({name: count for name, count in counts.items() if count})
        state.total_steps = int(self.data.get("steps") or state.total_steps)
        if not self.process:
            state.phase = "; ".join(f"{name}: {why}" for name, why in waiting.items() if why) or "waiting for the trainer's pod"


# --- watching ---------------------------------------------------------------------------------------------------------


async def look(release: Release) -> Look:
    """Raises `ServiceError` if there is no such release, or if its run publishes no state."""
    found = await run_states(release.client, f"{RUNS},{release.selector}")
    if not found:
        fix = "pipelinerl runs lists them; a release without kubernetesApi.enabled cannot be watched"
        raise ServiceError(f"no run of a release {release.name} in namespace {release.namespace}: {fix}")
    pods = await release.client.items(LIST_PODS, release.selector)
    state, data = found[0], found[0].get("data") or {}
    return Look(name_of(state).removesuffix(STATE), data, pods, SUBMITTED in labels_of(state), state["metadata"].get("uid", ""))


async def watch(release: Release, state: RunState, display: Display, began_s: float) -> Look:
    """Show the run until it is finished. Raises `ServiceError` if it fails or its release is gone, `KubeError` if a right is
    missing. An API server that is away and a trainer that restarts are waited for."""
    seen, following, finished_s = await look(release), asyncio.create_task(asyncio.sleep(0)), 0.0
    process: tuple[object, ...] = ()
    refused: list[KubeError] = []

    def elapsed_s() -> float:
        return time.monotonic() - began_s

    async with release.client.forwarded(f"{seen.prefix}-trainer-0", _GRPC_PORT, refused) as target:
        try:
            while True:
                try:
                    seen = await look(release)
                    seen.update(state)
                    if seen.process and seen.process != process:
                        certificates, name = await _identity(release, seen)
                        process = seen.process
                        following.cancel()
                        following = asyncio.create_task(follow_calls(target, state, elapsed_s, certificates, name, _RECONNECTS))
                except KubeError as error:
                    refused += [error] if error.denied else []
                    state.phase = printable(f"waiting for the Kubernetes API: {error.detail}")
                display.show(state, elapsed_s())
                if (reason := failure_of(seen.data, seen.trainer)) is not None:
                    raise ServiceError(f"the run failed: {reason}\n  log     {release.logs}\n  remove  {release.removing}")
                if refused:
                    raise refused[0]
                if following.done():
                    following.result()
                if seen.is_finished:
                    finished_s = finished_s or elapsed_s()
                    if state.step >= state.total_steps or elapsed_s() - finished_s > _LAST_STEPS_S:
                        return seen
                await asyncio.sleep(_LOOK_S)
        finally:
            following.cancel()
            await asyncio.wait({following})


async def _identity(release: Release, seen: Look) -> tuple[Certificates | None, str]:
    """Return the certificates with which to call the trainer, and the name in its own: with TLS, it accepts its own ones."""
    name = f"{seen.prefix}-trainer"
    volumes = {volume["name"]: volume for volume in (seen.trainer or {})["spec"].get("volumes") or ()}
    if "tls" not in volumes:
        return None, name
    secret = await release.client.secret(volumes["tls"]["secret"]["secretName"])
    return Certificates(secret[CERTIFICATE], secret[KEY], secret[CA]), name


# --- fetching ---------------------------------------------------------------------------------------------------------

FILES = ("recipe.yaml", "lineage.json", "metrics.jsonl", "samples.jsonl", "summary.json", "checkpoint")
"""The run's records, of which the report is made, and the folder of the trained model."""
_FOLDER = "/var/lib/pipelinerl/runs"
"""Of the runs, on the trainer's volume."""
_LIST = """
import json, os, sys
os.chdir(sys.argv[1])
def fail(error):
    raise error
folders = [top for top in sys.argv[2:] if os.path.isdir(top)]
names = [os.path.join(at, name) for top in folders for at, _, found in os.walk(top, onerror=fail) for name in found]
names += [name for name in sys.argv[2:] if os.path.isfile(name)]
print(json.dumps({name: os.path.getsize(name) for name in names if not os.path.islink(name)}))
"""
_NEEDED = {"recipe.yaml", "metrics.jsonl", "checkpoint"}
_MARK = ".submitted"
"""File in the fetched folder that names the installation from which its files come."""
_MOST_LISTED_BYTES = 16 * 2**20
_TRIES = 20
_SHOWN_BYTES = 16 * 2**20
"""Number of bytes after which the progress is shown again."""


async def fetch(release: Release, seen: Look, folder: Path, show: Callable[[str], None]) -> Path:
    """Fetch records and checkpoint into `folder`, write the report there, and return its path. A file that is here with its
    size is kept, and a part of one is continued. Raises `KubeError` or `ServiceError` if a file cannot be fetched."""
    failures = 0
    while True:
        try:
            await _fetch_all(release, seen, folder, show)
            return await asyncio.to_thread(write_report, folder)
        except KubeError as error:
            failures += 1
            if error.status in (401, 403, 404) or failures == _TRIES:  # a right is missing, or the pod is gone
                raise
            show(f"fetching again: {error.detail}")
            await asyncio.sleep(BACKOFF.after(error, failures))


async def _fetch_all(release: Release, seen: Look, folder: Path, show: Callable[[str], None]) -> None:
    pod, root = f"{seen.prefix}-trainer-0", f"{_FOLDER}/{seen.data['run']}"
    run = release.client.execute
    listed = b""
    async for data in run(pod, "trainer", ["python", "-I", "-c", _LIST, root, *FILES]):
        listed += data
        if len(listed) > _MOST_LISTED_BYTES:
            raise ServiceError(f"the trainer's pod lists more than {_MOST_LISTED_BYTES:,} bytes of file names")
    sizes = sizes_of(listed)
    if lacking := _NEEDED - {PurePosixPath(name).parts[0] for name in sizes}:
        raise ServiceError(f"the run's folder in the trainer's pod lacks {', '.join(sorted(lacking))}")
    check_folder(folder, seen.uid)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # noqa: ASYNC240 - nothing else runs meanwhile
    (folder / _MARK).write_text(seen.uid)
    targets = {name: target_of(folder, name) for name in sizes}
    done, total = 0, sum(sizes.values())
    if total > shutil.disk_usage(folder).free:
        raise ServiceError(f"the results have {total / 1e9:,.1f} GB, for which the disk of {folder} has no room")
    for name, size in sizes.items():
        target, part = targets[name], targets[name].with_name(f"{targets[name].name}.part")
        if target.is_file() and target.stat().st_size == size:
            done += size
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as file:
            done, shown = done + file.tell(), -_SHOWN_BYTES
            if file.tell() < size:
                async for data in run(pod, "trainer", ["tail", "-c", f"+{file.tell() + 1}", f"{root}/{name}"]):
                    file.write(data)
                    done += len(data)
                    if file.tell() > size:
                        break
                    if done - shown >= _SHOWN_BYTES:
                        shown = done
                        show(f"fetching {name}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")
        if (found := part.stat().st_size) != size:
            part.unlink()
            raise ServiceError(f"{name} has {found:,} bytes instead of {size:,}")
        part.replace(target)


def check_folder(folder: Path, uid: str) -> None:
    """Raise `ServiceError` if the folder has files of anything else than an interrupted fetch of this installation."""
    mark = folder / _MARK
    if not folder.exists() or (mark.is_file() and mark.read_text() == uid):
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise ServiceError(f"{folder} has files of another run; give another --output")


def sizes_of(listed: bytes) -> dict[str, int]:
    """Parse the list of files by name, with their bytes. Raises `ServiceError` if it is none."""
    try:
        return {str(name): int(size) for name, size in json.loads(listed).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ServiceError(f"the trainer's pod lists no files: {error}") from error


def target_of(folder: Path, name: str) -> Path:
    """Return where a file of the pod belongs. Raises `ServiceError` for a name that leads out of the folder, or past a link."""
    path = PurePosixPath(name)
    is_inside = path.parts[:1] and path.parts[0] in FILES and ".." not in path.parts and "\0" not in name
    if not is_inside or any((folder / at).is_symlink() for at in (path, *path.parents)):
        raise ServiceError(f"the trainer's pod lists the file {name!r}, which has no place in {folder}")
    return folder / path
