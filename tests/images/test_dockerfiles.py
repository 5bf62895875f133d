"""What every Dockerfile promises, read from its text: nothing is built here; `make image-check` does that."""

import re

import pytest

from tests.images.dockerfile import DOCKERFILES, ROOT, Dockerfile, read_dockerfile

WRITABLE = ("/tmp", "/var/lib/pipelinerl")
COMPILERS = re.compile(r"\b(gcc|g\+\+|clang|make|build-essential|python3-dev)\b")
GPU_CACHES = {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR", "HF_HOME"}


@pytest.fixture(params=sorted(DOCKERFILES))
def service(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dockerfile(service: str) -> Dockerfile:
    return read_dockerfile(DOCKERFILES[service])


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


def test_variables_of_the_service_are_fields_of_its_settings(service: str, dockerfile: Dockerfile) -> None:
    from pipelinerl.service import settings

    fields = getattr(settings, f"{service.capitalize()}Settings").model_fields
    ours = [key for key in dockerfile.final.pairs("ENV") if key.startswith("PIPELINERL_")]
    assert [key for key in ours if key.removeprefix("PIPELINERL_").lower() not in fields] == []


def test_what_is_copied_is_there_and_no_other_service_is(service: str, dockerfile: Dockerfile) -> None:
    copies = [value for value in dockerfile.instruction("COPY") if "--from=" not in value]
    copied = [source for value in copies for source in value.split()[:-1]]
    services = [source for source in copied if source.startswith("services/")]
    assert services == ["services/__init__.py", f"services/{service}"]
    assert "pipelinerl" in copied
    scripts = set(re.findall(r"deploy/images/[\w.-]+", " ".join(dockerfile.instruction("RUN"))))
    assert scripts
    for source in (*copied, *scripts):
        assert (ROOT / source).exists(), source


def test_the_image_of_one_box_has_the_actors_base_and_what_make_install_reads() -> None:
    path = ROOT / "deploy" / "images" / "box.Dockerfile"
    box = read_dockerfile(path).final
    assert box.base == read_dockerfile(DOCKERFILES["actor"]).arguments["BASE_IMAGE"]
    assert box.last("USER") == "10001:10001"
    assert box.exec_form("ENTRYPOINT") == ["tini", "--", "pipelinerl"]
    kept = {line[1:] for line in path.with_name("box.Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    assert {name for name in kept if not (ROOT / name).exists()} == set()
    install = re.search(r"^\$\(STAMP\):.*?\n\n", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    assert install
    read = re.findall(r"(?:requirements|deploy)/[\w/-]+\.(?:txt|py|sh)|pyproject\.toml", install[0])
    assert len(read) > 4
    assert {name for name in read if not any(name.startswith(one) for one in kept)} == set()
