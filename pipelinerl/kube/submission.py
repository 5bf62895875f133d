"""A release of the chart for one run: install it with Helm, watch it, fetch its results, and remove it.

The release of a finished run is removed only after every file has been fetched with its full size.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shlex
import shutil
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from grpc.aio import Channel

from pipelinerl.errors import EXIT_USER_ERROR, FieldError, ServiceError, UserError
from pipelinerl.kube import client as kube
from pipelinerl.kube.client import LIST_PODS, KubeError, Object, PersonClient, name_of
from pipelinerl.kube.completion import FAILED, FINISHED
from pipelinerl.local.ending import write_report
from pipelinerl.local.following import follow_calls
from pipelinerl.local.progress import Display, RunState
from pipelinerl.service.grpc import open_channel
from pipelinerl.service.logs import printable
from pipelinerl.service.tls import CA, CERTIFICATE, KEY, Certificates

COMPONENT, INSTANCE = "app.kubernetes.io/component", "app.kubernetes.io/instance"
RUNS = f"app.kubernetes.io/part-of=pipelinerl,{COMPONENT}=trainer"
"""Selector of the trainers' StatefulSets, and of the ConfigMaps with the states of runs."""
SUBMITTED = "pipelinerl/submitted"
"""Label of objects that `pipelinerl submit` has installed and may remove. Its value identifies the installation."""
STATE = "-run"
"""Suffix of the name of the ConfigMap with a run's state. The rest of the name is the prefix of all names in the release."""
_LOOK_S = 2.0
"""Seconds between two queries of the release's state, and between two attempts to fetch files."""
_LAST_STEPS_S, _GIVE_UP_S = 5.0, 600.0
"""Maximum seconds to wait for the last metrics, and seconds without progress after which a fetch is given up."""
_GRPC_PORT = 50051


class Release:
    """A release, with its display and the commands that a person may need. `left`: text that says what remains on the cluster
    if this process is interrupted."""

    def __init__(self, name: str, client: PersonClient, output: Path | None = None, steps: int = 0) -> None:
        self.name, self.client, self.left = name, client, "nothing was installed"
        self.state, self.display, self._began_s = RunState(name, steps), Display(sys.stdout), time.monotonic()
        self.selector = f"{INSTANCE}={name}"
        self.claims = f"{self.selector},{COMPONENT} in (nats,trainer)"
        self.options = ["-n", client.namespace, *(["--kube-context", client.context] if client.context else [])]
        kubectl = shlex.join(self.options).replace("--kube-context", "--context")
        self.watching = f"pipelinerl submit --attach {name} {kubectl}"
        self.watching += f" --output {shlex.quote(str(output))}" if output else ""
        self.unclaiming = f"kubectl {kubectl} delete pvc -l '{self.claims}'"
        self.removing = f"helm uninstall {name} {shlex.join(self.options)} --ignore-not-found && {self.unclaiming}"
        self.logs = f"kubectl {kubectl} logs -l {self.selector},{COMPONENT}=trainer --tail=100"
        self.goes_on = f"the run goes on\n  watch and fetch  {self.watching}\n  stop and remove  {self.removing}"

    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def show(self, phase: str = "") -> None:
        """Show the run's state, with a new phase if one is given."""
        self.state.phase = printable(phase) or self.state.phase
        self.display.show(self.state, self.elapsed_s())


async def helm(release: Release, *arguments: str, text: str = "") -> str:
    """Return the output of Helm, which gets `text` as input. Raises `ServiceError` with Helm's message if Helm fails."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("helm", *arguments, *release.options, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        output, errors = await process.communicate(text.encode())
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode:
        raise ServiceError(errors.decode(errors="replace").strip())
    return output.decode(errors="replace")


async def check_helm(release: Release) -> None:
    """Raise `UserError` unless Helm is there and new enough."""
    version = (await helm(release, "version", "--short")).strip() if shutil.which("helm") else "not on PATH"
    found = re.match(r"v(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < (3, 14):
        raise UserError(f"helm is {version}: install Helm 3.14 or newer (https://helm.sh/docs/intro/install)")


async def check_absent(release: Release) -> None:
    """Raise `FieldError` if a release, a run or claims of this name exist."""
    found, states = [], await run_states(release.client)
    with suppress(ServiceError):  # there is none
        await helm(release, "status", release.name)
        found.append(f"this release exists; watch it ({release.watching}), remove it ({release.removing})")
    if claims := [name_of(claim) for claim in await release.client.items(kube.LIST_CLAIMS, release.claims)]:
        found.append(f"an earlier release left the claims {', '.join(claims)}; remove them ({release.unclaiming})")
    others = [labels_of(state)[INSTANCE] for state in states if (state.get("data") or {}).get("run") == release.name]
    found += [f"the release {other} has a run of this name; remove that release" for other in others]
    if found:
        raise FieldError("--release", release.name, f"{found[0]}, or give another name")


async def run_states(client: PersonClient, selector: str = RUNS) -> list[Object]:
    """Return the ConfigMaps with the states of runs."""
    return [item for item in await client.items(kube.LIST_CONFIGS, selector) if name_of(item).endswith(STATE)]


async def install(release: Release, chart: str, files: Sequence[Path], values: Mapping[str, Any]) -> None:
    """Install the chart with `values`, which the values in `files` override, and show what pods wait for. If the installation
    fails, remove it. In that case, raises `UserError` if the chart's check refused the values, else `ServiceError`."""
    installation = uuid.uuid4().hex
    needed = f"trainer.onCompletion=keep,kubernetesApi.enabled=true,commonLabels.{SUBMITTED}={installation}"
    given = [*(f"--values={file}" for file in ("-", *files)), f"--set={needed}", "--timeout=15m"]
    installing = asyncio.create_task(helm(release, "install", release.name, chart, *given, text=json.dumps(values)))
    selector = f"{SUBMITTED}={installation}"

    async def reasons(only: str = "") -> list[str]:
        with suppress(KubeError):  # Helm says what is wrong
            pods = await release.client.items(LIST_PODS, selector + only)
            return [f"{name_of(pod)}: {why}" for pod in pods if (why := why_not_ready(pod))]
        return []

    try:
        while not installing.done():
            release.show("; ".join(["installing", *await reasons()]))
            await asyncio.wait({installing}, timeout=_LOOK_S)
        installing.result()
    except ServiceError as error:
        stored = ""
        with suppress(ServiceError):  # nothing is stored
            stored = await helm(release, "get", "values", release.name)
        if installation not in stored:  # somebody else installs a release of this name
            raise
        refused, left = "; ".join(await reasons(f",{COMPONENT}=validation")), "nothing is left installed"
        await remove(release)
        try:
            for kind in (kube.LIST_JOBS, kube.LIST_CONFIGS, kube.LIST_ACCOUNTS):  # of the chart's check, which Helm keeps
                await release.client.delete(kind, selector)
        except KubeError as denied:
            left = f"only the Job of the chart's check is left ({denied})"
        raise (UserError(f"{left}: {refused}\nHelm says: {error}") if refused else ServiceError(f"{left}: {error}")) from error
    finally:
        installing.cancel()
        await asyncio.wait({installing})


async def remove(release: Release) -> None:
    """Uninstall the release and delete its claims, also if the release is already gone."""
    await helm(release, "uninstall", release.name, "--ignore-not-found")
    await release.client.delete(kube.LIST_CLAIMS, release.claims)


def labels_of(item: Object) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


def _status(pod: Object | None, part: str) -> list[Object]:
    return ((pod or {}).get("status") or {}).get(part) or []


def is_ready(pod: Object | None) -> bool:
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
    states = [one.get(when) or {} for one in _status(trainer, "containerStatuses") for when in ("state", "lastState")]
    ends = [ended for state in states if (ended := state.get("terminated") or {}).get("exitCode") == EXIT_USER_ERROR]
    return (ends[0].get("message") or f"the trainer ended with exit code {EXIT_USER_ERROR}").strip() if ends else None


@dataclass
class Look:
    """A release at one moment. `prefix`: beginning of its objects' names. `data`: state of its run. `uid`: identifies this
    installation and the run's policy version. A fetch continues an interrupted one only if both have the same `uid`."""

    prefix: str
    data: Mapping[str, str]
    pods: Sequence[Object]
    was_submitted: bool = True
    uid: str = ""

    @property
    def is_finished(self) -> bool:
        """True if the trainer has reported that the run is finished. A report from before a Helm upgrade does not count."""
        revision = labels_of(self.trainer or {"metadata": {}}).get("controller-revision-hash", "")
        return self.data.get("phase") == FINISHED and self.data.get("revision", revision) == revision

    @property
    def trainer(self) -> Object | None:
        return next((pod for pod in self.pods if name_of(pod) == f"{self.prefix}-trainer-0"), None)

    def update(self, state: RunState) -> None:
        """Write into `state` the pods' restarts and what they wait for. A trainer that is ready reports its phase itself."""
        pods = {name_of(pod).removeprefix(f"{self.prefix}-"): pod for pod in self.pods}
        waiting = {name: why_not_ready(pod) for name, pod in sorted(pods.items())}
        actors = {name for name, pod in pods.items() if labels_of(pod).get(COMPONENT) == "actor"}
        state.actors = {name: why or "serving" for name, why in waiting.items() if name in actors}
        counts = {name: sum(one["restartCount"] for one in _status(pod, "containerStatuses")) for name, pod in pods.items()}
        state.restarts = +Counter(counts)
        state.total_steps = int(self.data.get("steps") or state.total_steps)
        if not is_ready(self.trainer):
            state.phase = "; ".join(f"{name}: {why}" for name, why in waiting.items() if why) or "waiting for the trainer's pod"


async def look(release: Release) -> Look:
    """Return the release as it is now. Raises `ServiceError` if it does not exist, or if its run publishes no state."""
    if not (found := await run_states(release.client, f"{RUNS},{release.selector}")):
        fix = "list the runs with `pipelinerl runs`; a release without kubernetesApi.enabled cannot be watched"
        raise ServiceError(f"found no run of release {release.name} in namespace {release.client.namespace}: {fix}")
    pods = await release.client.items(LIST_PODS, f"{release.selector},{COMPONENT} in (actor,nats,page,trainer,verifier)")
    state, data = found[0], found[0].get("data") or {}
    uid = f"{state['metadata'].get('uid', '')} {data.get('policyVersion', '')}"
    return Look(name_of(state).removesuffix(STATE), data, pods, SUBMITTED in labels_of(state), uid)


async def watch(release: Release) -> Look:
    """Show the run until it is finished. Wait while the trainer restarts and, after a first successful query, while the API
    server does not answer. Raises `ServiceError` if the run fails or its release is gone, and `KubeError` if the first query
    fails or a permission is missing."""
    seen, following, finished_s = await look(release), asyncio.create_task(asyncio.sleep(0)), 0.0
    state, refused = release.state, list[KubeError]()
    async with release.client.forwarded(f"{seen.prefix}-trainer-0", _GRPC_PORT, refused) as target:
        try:
            while True:
                try:
                    seen = await look(release)
                    seen.update(state)
                    if following.done() and is_ready(seen.trainer):
                        following.result()  # it never ends without an error
                        channel = await _channel(release, seen, target)
                        following = asyncio.create_task(follow_calls(channel, state, release.elapsed_s))
                except KubeError as error:
                    refused += [error] if error.denied else []
                    state.phase = printable(f"waiting for the Kubernetes API: {error.detail}")
                release.show()
                if (reason := failure_of(seen.data, seen.trainer)) is not None:
                    raise ServiceError(f"the run failed: {reason}\n  log     {release.logs}\n  remove  {release.removing}")
                if refused:
                    raise refused[0]
                if seen.is_finished:
                    finished_s = finished_s or release.elapsed_s()
                    if state.step >= state.total_steps or release.elapsed_s() - finished_s > _LAST_STEPS_S:
                        return seen
                await asyncio.sleep(_LOOK_S)
        finally:
            following.cancel()
            await asyncio.wait({following})


async def _channel(release: Release, seen: Look, target: str) -> Channel:
    """Open a channel to the trainer. The client uses the trainer's own certificate, from its Secret. A trainer without one is
    called without TLS."""
    volumes = {volume["name"]: volume for volume in (seen.trainer or {})["spec"].get("volumes") or ()}
    certificates = None
    if "tls" in volumes:
        secret = await release.client.call(kube.GET_SECRET, name=volumes["tls"]["secret"]["secretName"])
        certificates = Certificates(*(base64.b64decode(secret["data"][name]) for name in (CERTIFICATE, KEY, CA)))
    return open_channel(target, certificates, f"{seen.prefix}-trainer", [("grpc.max_reconnect_backoff_ms", 5000)])


FILES = ("recipe.yaml", "lineage.json", "metrics.jsonl", "samples.jsonl", "summary.json", "checkpoint")
"""Files of the run from which the report is made, and the folder of the trained model."""
_FOLDER = "/var/lib/pipelinerl/runs"  # on the trainer's volume
_NEEDED = {"recipe.yaml", "metrics.jsonl", "checkpoint"}
_MARK = ".submitted"
"""File in the fetched folder that names the installation from which its files come."""
_SHOWN_BYTES = 16 * 2**20
"""Number of fetched bytes between two lines that show the progress."""


async def fetch(release: Release, seen: Look, folder: Path) -> Path:
    """Fetch the run's files into `folder`, write the report there, and return its path. Continue files that an earlier
    attempt fetched in part. Raises `ServiceError` if a file is lacking or has a wrong size, the disk is too small, or nothing
    arrives for `_GIVE_UP_S` seconds. Raises `KubeError` if a permission is missing or the pod is gone, and `UserError` if the
    folder has other files, or if no report can be made from the fetched files."""
    before, since_s = -1, 0.0
    while True:
        try:
            await _fetch_all(release, seen, folder)
            return await asyncio.to_thread(write_report, folder)
        except KubeError as error:
            if error.status in (401, 403, 404):  # a permission is missing, or the pod is gone
                raise
            if (here := _bytes_in(folder)) > before:
                before, since_s = here, time.monotonic()
            elif time.monotonic() - since_s > _GIVE_UP_S:
                raise ServiceError(f"{error}; nothing has arrived for {_GIVE_UP_S:g} s; run the command again") from error
            release.show(f"fetching again: {error.detail}")
            await asyncio.sleep(_LOOK_S)


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


async def _fetch_all(release: Release, seen: Look, folder: Path) -> None:
    pod, root, listed = f"{seen.prefix}-trainer-0", f"{_FOLDER}/{seen.data['run']}", b""
    run = release.client.execute
    async for data in run(pod, "trainer", ["find", root, "-type", "f", "-printf", "%s %P\\n"]):
        listed += data
    files = files_of(listed, folder)
    if lacking := _NEEDED - {name.partition("/")[0] for name in files}:
        raise ServiceError(f"the run's folder in the trainer's pod lacks {', '.join(sorted(lacking))}")
    check_folder(folder, seen.uid)
    total = sum(size for size, _ in files.values())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # noqa: ASYNC240 - nothing else runs meanwhile
    (folder / _MARK).write_text(seen.uid)
    if total - _bytes_in(folder) > shutil.disk_usage(folder).free:
        raise ServiceError(f"the results need {total / 1e9:,.1f} GB, more than the disk of {folder} has free; free some space")
    for name, (size, target) in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab") as file:
            if file.tell() != size:
                async for data in run(pod, "trainer", ["tail", "-c", f"+{file.tell() + 1}", f"{root}/{name}"]):
                    file.write(data)
                    if file.tell() > size:
                        break
                    if file.tell() % _SHOWN_BYTES <= len(data):
                        release.show(f"fetching {name}: {_bytes_in(folder) / 1e6:,.0f} of {total / 1e6:,.0f} MB")
        if (found := target.stat().st_size) != size:
            target.unlink()
            raise ServiceError(f"{name} has {found:,} bytes instead of {size:,}")


def check_folder(folder: Path, installation: str = "") -> None:
    """Raise `FieldError` if the folder has files, unless an interrupted fetch of this installation wrote them."""
    mark = folder / _MARK
    is_own = installation and mark.is_file() and mark.read_text() == installation
    if folder.exists() and not is_own and (not folder.is_dir() or any(folder.iterdir())):
        raise FieldError("--output", str(folder), "has other files; give a folder that is empty or does not exist")


def files_of(listed: bytes, folder: Path) -> dict[str, tuple[int, Path]]:
    """Return size and local path of each listed file that belongs to `FILES`. Raises `ServiceError` if the list cannot be
    parsed, or if a name leads out of `folder` or through a symbolic link in it."""
    files = {}
    try:
        for size, name in (line.split(" ", 1) for line in listed.decode().splitlines()):
            if name.partition("/")[0] in FILES:
                files[name], path = (int(size), folder / name), PurePosixPath(name)
                if ".." in path.parts or "\0" in name or any((folder / at).is_symlink() for at in (path, *path.parents[:-1])):
                    raise ServiceError(f"the trainer's pod lists {name!r}, which leads out of {folder} or through a link")
    except ValueError as error:
        raise ServiceError(f"cannot read the list of files in the trainer's pod: {error}") from error
    return files
