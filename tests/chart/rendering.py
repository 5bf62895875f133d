"""What the real helm makes of the chart and some values, and where to find things in it."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm"
CPU_VALUES = CHART / "values-cpu.yaml"
HELM = Path(sys.executable).with_name("helm")
RELEASE, NAMESPACE = "pipelinerl", "train"
WORKLOADS = ("Deployment", "StatefulSet")
SERVICES = ("actor", "trainer", "verifier")
COMPONENT = "app.kubernetes.io/component"


class HelmError(Exception):
    """helm refused. The text is its message."""


def helm(*arguments: str | Path, text: str = "") -> str:
    """Its output. Raises `HelmError`."""
    done = subprocess.run([HELM, *arguments], input=text, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise HelmError(done.stderr)
    return done.stdout


def rendered_text(
    values: Mapping[str, Any] | None = None, files: Sequence[Path] = (), release: str = RELEASE, extra: Sequence[str] = ()
) -> str:
    given = [f"--values={file}" for file in (*files, "-")]
    text = json.dumps(dict(values or {}), ensure_ascii=False)  # JSON is YAML without its surprises: y is no boolean
    return helm("template", release, CHART, "--namespace", NAMESPACE, *given, *extra, text=text)


@dataclass(frozen=True)
class Pod:
    """A pod as a workload (or the chart itself) makes it."""

    owner: str
    metadata: Object
    spec: Object

    @property
    def component(self) -> str:
        return str(self.metadata["labels"][COMPONENT])

    @property
    def labels(self) -> Mapping[str, str]:
        return dict(self.metadata["labels"])

    @property
    def containers(self) -> list[Object]:
        """Init containers first."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def main(self) -> Object:
        return dict(self.spec["containers"][0])

    @property
    def ports(self) -> Mapping[str, int]:
        return {port["name"]: port["containerPort"] for of in self.containers for port in of.get("ports", [])}


@dataclass(frozen=True)
class Rendered:
    """Kubernetes objects, found by kind, name and labels."""

    objects: list[Object]

    def of_kind(self, *kinds: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] in kinds]

    def find(self, kind: str, name: str) -> Object | None:
        return next((item for item in self.of_kind(kind) if item["metadata"]["name"] == name), None)

    def one(self, kind: str, name: str) -> Object:
        """Raises `LookupError`."""
        if (found := self.find(kind, name)) is None:
            raise LookupError(f"no {kind} {name}")
        return found

    @property
    def pods(self) -> list[Pod]:
        """Those of hooks, too."""
        found = []
        for item in self.of_kind(*WORKLOADS, "Job", "Pod"):
            made = item["spec"].get("template", item)
            found.append(Pod(f"{item['kind']}/{item['metadata']['name']}", made["metadata"], made["spec"]))
        return found

    def pod(self, component: str) -> Pod:
        return next(pod for pod in self.pods if pod.component == component)

    def selected(self, selector: Mapping[str, str]) -> list[Pod]:
        return [pod for pod in self.pods if selector.items() <= pod.labels.items()]


def environment(container: Object) -> dict[str, Object]:
    """Entries by name. Raises `ValueError` when a name comes twice."""
    found = {entry["name"]: entry for entry in container.get("env", [])}
    if len(found) != len(container.get("env", [])):
        raise ValueError(f"{container['name']}: a variable is set twice")
    return found


def render(
    values: Mapping[str, Any] | None = None, files: Sequence[Path] = (), release: str = RELEASE, extra: Sequence[str] = ()
) -> Rendered:
    text = rendered_text(values, files, release, extra)
    return Rendered([item for item in yaml.load_all(text, Loader=yaml.CSafeLoader) if item])
