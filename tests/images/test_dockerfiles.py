"""What every Dockerfile promises, read from its text: nothing is built here; `make image-check` does that."""

import re
import tomllib

import pytest

from tests.images.dockerfile import DOCKERFILES, ROOT, Dockerfile, ignore_patterns, is_ignored, read_dockerfile

WRITABLE = ("/tmp", "/var/lib/pipelinerl")
COMPILERS = re.compile(r"\b(gcc|g\+\+|clang|make|build-essential|python3-dev)\b")
GPU_CACHES = {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR", "HF_HOME"}


@pytest.fixture(params=sorted(DOCKERFILES))
def service(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dockerfile(service: str) -> Dockerfile:
    return read_dockerfile(DOCKERFILES[service])


def sources(dockerfile: Dockerfile) -> list[str]:
    """What COPY takes from the build context."""
    copies = [value for value in dockerfile.instruction("COPY") if "--from=" not in value]
    return [source for value in copies for source in value.split()[:-1]]


def test_there_is_one_per_service() -> None:
    assert sorted(DOCKERFILES) == ["actor", "trainer", "verifier"]


def test_runs_as_10001_under_tini(service: str, dockerfile: Dockerfile) -> None:
    assert dockerfile.final.last("USER") == "10001:10001"
    assert dockerfile.final.exec_form("ENTRYPOINT") == ["tini", "--"]
    assert dockerfile.final.exec_form("CMD") == ["python", "-m", f"services.{service}"]


def test_bases_and_debian_packages_have_exact_versions(service: str, dockerfile: Dockerfile) -> None:
    """A CUDA base has the major and minor version of the CUDA runtime among the pins, for which the wheels are built."""
    assert dockerfile.stages[0].base == "${BASE_IMAGE}"
    image, _, tag = dockerfile.arguments["BASE_IMAGE"].partition(":")
    assert re.search(r"\d+\.\d+\.\d+|\d{8}", tag), tag
    assert image == ("debian" if service == "verifier" else "nvidia/cuda")
    if service != "verifier":
        pins = (ROOT / "requirements" / "images" / f"{service}-cuda.txt").read_text()
        runtime = re.search(r"^nvidia-cuda-runtime==(\d+\.\d+)", pins, re.MULTILINE)
        assert tag.startswith(f"{runtime[1]}.")
    assert {stage.base for stage in dockerfile.stages[1:]} <= {"base", "on-${FLAVOUR}"}
    for command in dockerfile.instruction("RUN"):
        for names in re.findall(r"--no-install-recommends([^&]*)", command):
            assert all("=" in name for name in names.split()), names


def test_compilers_are_in_no_stage_that_the_final_one_stands_on(dockerfile: Dockerfile) -> None:
    stages = {stage.name: stage for stage in dockerfile.stages}
    assert "gcc" in " ".join(stages.pop("build").all("RUN"))
    for stage in stages.values():
        assert not COMPILERS.search(" ".join(stage.all("RUN")))
    assert dockerfile.final.all("COPY") == ["--from=build /opt/pipelinerl /opt/pipelinerl"]


def test_caches_are_where_a_read_only_root_lets_them_be(service: str, dockerfile: Dockerfile) -> None:
    variables = dockerfile.final.pairs("ENV")
    folders = {
        key: value for key, value in variables.items() if re.search(r"(HOME|_DIR|_ROOT|CONFIGDIR|CACHE_PATH|MODEL_CACHE)$", key)
    }
    assert {"HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR"} <= set(folders)
    assert service == "verifier" or set(folders) >= GPU_CACHES, "what compiles on a GPU has a writable cache"
    assert ("VLLM_CACHE_ROOT" in folders) == (service == "actor")
    assert all(value.startswith(WRITABLE) for value in folders.values()), folders
    assert variables["PYTHONDONTWRITEBYTECODE"] == "1"


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert labels.pop("description")
    assert labels == {
        "title": f"pipelinerl-{service}",
        "version": "${VERSION}",
        "revision": "${REVISION}",
        "source": "${SOURCE}",
        "licenses": project["license"],
    }
    assert f"VERSION={project['version']}" in dockerfile.final.all("ARG")


def test_variables_of_the_service_are_fields_of_its_settings(service: str, dockerfile: Dockerfile) -> None:
    from pipelinerl.service import settings

    fields = getattr(settings, f"{service.capitalize()}Settings").model_fields
    ours = [key for key in dockerfile.final.pairs("ENV") if key.startswith("PIPELINERL_")]
    assert [key for key in ours if key.removeprefix("PIPELINERL_").lower() not in fields] == []


def test_what_is_copied_is_there_and_reaches_the_builder_and_no_other_service_does(
    service: str, dockerfile: Dockerfile
) -> None:
    copied, patterns = sources(dockerfile), ignore_patterns()
    services = [source for source in copied if source.startswith("services/")]
    assert services == ["services/__init__.py", f"services/{service}"]
    assert "pipelinerl" in copied
    scripts = set(re.findall(r"deploy/images/[\w.-]+", " ".join(dockerfile.instruction("RUN"))))
    assert scripts
    for source in (*copied, *scripts):
        assert (ROOT / source).exists(), source
        inside = [str(path.relative_to(ROOT)) for path in (ROOT / source).rglob("*.py")] or [source]
        assert any(not is_ignored(path, patterns) for path in inside), source


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
