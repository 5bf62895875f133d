"""What every Dockerfile promises, read from its text: nothing is built here; `make image-check` does that."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.images.dockerfile import DOCKERFILES, ROOT, Dockerfile, ignore_patterns, is_ignored, read_dockerfile

HADOLINT = Path(sys.executable).parent / "hadolint"
WRITABLE = ("/tmp", "/var/lib/pipelinerl")


@pytest.fixture(params=sorted(DOCKERFILES))
def service(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dockerfile(service: str) -> Dockerfile:
    return read_dockerfile(DOCKERFILES[service])


def sources(value: str) -> list[str]:
    """What a COPY takes from the build context."""
    return value.split()[:-1] if "--from=" not in value else []


def test_there_is_one_per_service() -> None:
    assert sorted(DOCKERFILES) == ["actor", "trainer", "verifier"]


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run([HADOLINT, *DOCKERFILES.values()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_runs_as_10001_under_tini(service: str, dockerfile: Dockerfile) -> None:
    assert dockerfile.final.last("USER") == "10001:10001"
    assert dockerfile.final.exec_form("ENTRYPOINT") == ["tini", "--"]
    assert dockerfile.final.exec_form("CMD") == ["python", "-m", f"services.{service}"]


def test_a_base_is_an_argument_with_an_exact_tag(dockerfile: Dockerfile) -> None:
    assert dockerfile.stages[0].base == "${BASE_IMAGE}"
    image, _, tag = dockerfile.arguments["BASE_IMAGE"].partition(":")
    assert image in ("debian", "nvidia/cuda")
    assert re.search(r"\d+\.\d+\.\d+|\d{8}", tag), tag
    assert {stage.base for stage in dockerfile.stages[1:]} <= {"base", "on-${FLAVOUR}"}


def test_the_cuda_base_is_the_one_the_wheels_are_built_for() -> None:
    """Same major and minor version as the CUDA runtime among the pins."""
    for service in ("actor", "trainer"):
        base = read_dockerfile(DOCKERFILES[service]).arguments["BASE_IMAGE"]
        pins = (ROOT / "requirements" / "images" / f"{service}-cuda.txt").read_text()
        runtime = re.search(r"^nvidia-cuda-runtime==(\d+\.\d+)", pins, re.MULTILINE)
        assert runtime is not None
        assert base.startswith(f"nvidia/cuda:{runtime[1]}.")


def test_compilers_are_in_no_stage_that_the_final_one_stands_on(dockerfile: Dockerfile) -> None:
    stages = {stage.name: stage for stage in dockerfile.stages}
    assert "gcc" in " ".join(stages.pop("build").all("RUN"))
    for stage in stages.values():
        assert not re.search(r"\b(gcc|g\+\+|clang|make|build-essential|python3-dev)\b", " ".join(stage.all("RUN")))
    assert dockerfile.final.all("COPY") == ["--from=build /opt/pipelinerl /opt/pipelinerl"]


def test_every_debian_package_is_pinned_to_a_version(dockerfile: Dockerfile) -> None:
    for command in dockerfile.instruction("RUN"):
        for names in re.findall(r"--no-install-recommends([^&]*)", command):
            assert all("=" in name for name in names.split()), names


def test_caches_are_where_a_read_only_root_lets_them_be(dockerfile: Dockerfile) -> None:
    variables = dockerfile.final.pairs("ENV")
    folders = {
        key: value
        for key, value in variables.items()
        if re.search(r"(HOME|_DIR|_ROOT|CONFIGDIR|CACHE_PATH|MODEL_CACHE)$", key)
    }
    assert {"HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR"} <= set(folders)
    assert all(value.startswith(WRITABLE) for value in folders.values()), folders
    assert variables["PYTHONDONTWRITEBYTECODE"] == "1"


@pytest.mark.parametrize("service", ["actor", "trainer"])
def test_what_compiles_on_a_gpu_has_a_writable_cache(service: str) -> None:
    variables = read_dockerfile(DOCKERFILES[service]).final.pairs("ENV")
    assert {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR", "HF_HOME"} <= set(variables)
    assert ("VLLM_CACHE_ROOT" in variables) == (service == "actor")


def test_what_stands_in_for_a_compiler_is_told_to_torch() -> None:
    """On a GPU a compiler that has one answer ready; on a CPU vLLM compiles nothing."""
    actor = {stage.name: stage.pairs("ENV") for stage in read_dockerfile(DOCKERFILES["actor"]).stages}
    assert actor["on-cuda"] == {"CC": "/opt/pipelinerl/bin/prebuilt-cc"}
    assert actor["on-cpu"] == {"TORCH_COMPILE_DISABLE": "1"}
    trainer = read_dockerfile(DOCKERFILES["trainer"]).final.pairs("ENV")
    assert trainer["CC"] == actor["on-cuda"]["CC"]
    assert "TORCH_COMPILE_DISABLE" not in trainer


def test_labels_are_complete_and_filled_from_arguments(service: str, dockerfile: Dockerfile) -> None:
    labels = {key.rpartition(".")[2]: value for key, value in dockerfile.final.pairs("LABEL").items()}
    assert set(labels) == {"title", "description", "version", "revision", "source", "licenses"}
    assert labels["title"] == f"pipelinerl-{service}"
    assert (labels["version"], labels["revision"], labels["source"]) == ("${VERSION}", "${REVISION}", "${SOURCE}")
    assert labels["description"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert labels["licenses"] == project["license"]
    assert f"VERSION={project['version']}" in dockerfile.final.all("ARG")


def test_variables_of_the_service_are_fields_of_its_settings(service: str, dockerfile: Dockerfile) -> None:
    from pipelinerl.service import settings

    fields = getattr(settings, f"{service.capitalize()}Settings").model_fields
    ours = [key for key in dockerfile.final.pairs("ENV") if key.startswith("PIPELINERL_")]
    assert [key for key in ours if key.removeprefix("PIPELINERL_").lower() not in fields] == []


def test_what_is_copied_is_there_and_reaches_the_builder(dockerfile: Dockerfile) -> None:
    patterns = ignore_patterns()
    for value in dockerfile.instruction("COPY"):
        for source in sources(value):
            assert (ROOT / source).exists(), source
            inside = [source, *(str(path.relative_to(ROOT)) for path in (ROOT / source).rglob("*.py"))]
            assert any(not is_ignored(path, patterns) for path in (inside[1:] or inside)), source


def test_a_service_holds_no_other_service(service: str, dockerfile: Dockerfile) -> None:
    copied = [source for value in dockerfile.instruction("COPY") for source in sources(value)]
    assert [source for source in copied if source.startswith("services/")] == [
        "services/__init__.py",
        f"services/{service}",
    ]
    assert "pipelinerl" in copied


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        (".git/HEAD", True),
        (".venv/bin/python", True),
        ("runs/arithmetic/report.html", True),
        ("tests/unit/test_codec.py", True),
        ("requirements/cpu.txt", True),
        ("pipelinerl/__pycache__/codec.cpython-311.pyc", True),
        ("pipelinerl/page/report.html", False),
        ("services/actor/app.py", False),
        ("recipes/arithmetic.yaml", False),
        ("requirements/images/verifier.txt", False),
    ],
)
def test_only_what_the_images_need_is_sent_to_the_builder(path: str, ignored: bool) -> None:
    assert is_ignored(path, ignore_patterns()) is ignored


def test_scripts_that_a_build_runs_reach_it(dockerfile: Dockerfile) -> None:
    commands = " ".join(dockerfile.instruction("RUN"))
    scripts = set(re.findall(r"deploy/images/[\w.-]+", commands))
    assert scripts
    assert [script for script in scripts if is_ignored(script, ignore_patterns()) or not (ROOT / script).exists()] == []
