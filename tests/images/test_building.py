"""The scripts around a build: what they ask of a builder, pass on of pip's settings, and put in a compiler's place."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from deploy.images import local_pip
from tests.chart.cases import rendered_case
from tests.chart.rendering import CHART, HELM
from tests.images.dockerfile import ROOT

IMAGES = ROOT / "deploy" / "images"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
OURS = {"FLAVOUR": "cpu", "REGISTRY": "registry.example.org", "TAG": "7"}
OF_VERSION = f"--build-arg VERSION={VERSION} --build-arg REVISION=abc"


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def build(folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """With a `docker` that writes down its arguments, one call a line."""
    program(folder / "docker", f'echo "$@" >>{folder}/calls')
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), "REVISION": "abc", **variables}
    return subprocess.run([IMAGES / "build.sh"], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("variables", "service", "said", "unsaid"),
    [
        ({}, "actor", [f"--tag pipelinerl/actor:{VERSION} ", "--build-arg FLAVOUR=cuda", OF_VERSION], "BASE_IMAGE"),
        (OURS, "actor", ["--tag registry.example.org/pipelinerl/actor:7-cpu ", "--build-arg BASE_IMAGE=debian:"], "cuda"),
        (OURS, "verifier", ["verifier:7 ", "verifier:7-cpu ", "BASE_IMAGE=debian:"], "FLAVOUR"),
        ({"BASE_IMAGE": "example/cuda:1"}, "trainer", ["BASE_IMAGE=example/cuda:1"], "debian"),
        ({"BASE_IMAGE": "example/cuda:1"}, "verifier", [OF_VERSION], "BASE_IMAGE"),  # a CUDA base is not the verifier's
    ],
)
def test_a_builder_is_asked_for(tmp_path: Path, variables: dict[str, str], service: str, said: list[str], unsaid: str) -> None:
    assert build(tmp_path, {"SERVICES": service, **variables}).returncode == 0
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert [part for part in said if part not in call] == []
    assert unsaid not in call
    refused = build(tmp_path, {"FLAVOUR": "rocm"})
    assert (refused.returncode, "FLAVOUR = 'rocm': use cuda or cpu" in refused.stderr) == (1, True)


@pytest.mark.parametrize(
    ("there", "anyway", "at_index", "index", "said"),
    [
        (True, 0, 0, "", ""),
        (False, 0, 0, "", "found where pip looks anyway"),
        (False, 1, 0, "", "found at https://download.pytorch.org/whl/cpu"),
        (False, 1, 0, "https://mirror.example/cpu", "found at https://mirror.example/cpu"),
        (False, 1, 1, "", "neither where pip looks anyway nor at https://download.pytorch.org/whl/cpu. Name an index"),
    ],
)
def test_torch_for_cpu_comes_from_pips_index_or_else_from_pytorchs(
    tmp_path: Path, there: bool, anyway: int, at_index: int, index: str, said: str
) -> None:
    """`there`: it is left alone. `anyway`, `at_index`: exit codes of pip."""
    asked = tmp_path / "calls"
    asked.touch()
    python = program(
        tmp_path / "python",
        f'[ "$1" = -c ] && exit {int(not there)}\necho "$@" >>{asked}\n'
        f'case "$*" in *--index-url*) exit {at_index} ;; *) echo "no such build" >&2; exit {anyway} ;; esac',
    )
    command = [IMAGES / "install_torch.sh", ROOT / "requirements" / "cpu.txt", python, "--no-compile"]
    done = subprocess.run(command, env={**os.environ, "TORCH_INDEX": index}, capture_output=True, text=True)

    assert said in done.stdout + done.stderr
    assert done.returncode == (anyway and at_index)
    assert ("no such build" in done.stderr) == bool(done.returncode)
    calls = asked.read_text().splitlines()
    assert len(calls) == (0 if there else 1 + anyway)
    assert all(re.fullmatch(r"-m pip install --no-deps .*--no-compile torch==2\.\S+\+cpu", call) for call in calls)


def test_everything_that_pip_installs_from_a_file_is_checked_by_its_hash() -> None:
    texts = [(ROOT / name).read_text() for name in ("Makefile", "deploy/images/install.sh")]
    installs = [
        line
        for text in texts
        for line in text.splitlines()
        if " -r " in line and ("pip install" in line or "PIP)" in line or "INSTALL)" in line)
    ]
    assert len(installs) == 11
    assert [line for line in installs if "$(HASHED)" not in line and "--require-hashes" not in line] == []
    assert "HASHED := --no-deps --require-hashes\n" in texts[0]


def test_pips_settings_go_into_the_build_with_the_folders_they_name(tmp_path: Path) -> None:
    (tmp_path / "index" / "simple").mkdir(parents=True)
    certificates = tmp_path / "ca.crt"
    certificates.touch()
    found = local_pip.settings(
        f":env:.cert='{certificates}'\n"
        "global.cert='/overridden'\n"
        f"global.extra-index-url='file://{tmp_path}/index/simple https://example.org/simple'\n"
        "global.no-color='true'\n"
    )
    assert local_pip.config(found) == (
        "[global]\n"
        f"extra-index-url = file://{tmp_path}/index/simple https://example.org/simple\n"
        f"cert = {local_pip.CERTIFICATES}\n"
    )
    assert local_pip.volumes(found) == [f"{certificates}:{local_pip.CERTIFICATES}:ro", f"{tmp_path}/index:{tmp_path}/index:ro"]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on this machine")
def test_triton_builds_its_driver_where_no_compiler_is(tmp_path: Path) -> None:
    """By Triton's own code, in a process of its own: Triton looks for its compiler once."""
    triton = pytest.importorskip("triton")
    environment = tmp_path / "environment"
    site, bin_folder = environment / "lib" / "python3" / "site-packages", environment / "bin"
    site.mkdir(parents=True)
    (site / "triton").symlink_to(Path(triton.__file__).parent)
    bin_folder.mkdir()
    shutil.copy(IMAGES / "prebuilt-cc", bin_folder)
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run([IMAGES / "prebuild_cc.sh", environment], env=variables, check=True)
    program = (
        "from triton.backends.nvidia import driver as d; from triton.runtime.build import compile_so_from_file as c\n"
        "print(c(d.dirname + '/driver.c', 'cuda_utils', [d.libdevice_dir], d.include_dirs, d.libraries))"
    )
    # Triton loads what was compiled: with an empty library in the driver's place
    stub = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", stub], check=True)
    variables = {
        "CC": str(bin_folder / "prebuilt-cc"),
        "PATH": "/usr/bin:/bin",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "LD_LIBRARY_PATH": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (prebuilt,) = (environment / "lib" / "prebuilt-cc").glob("*.so")
    assert Path(done.stdout.strip()).read_bytes() == prebuilt.read_bytes()
    (source := tmp_path / "other.c").touch()
    other = [bin_folder / "prebuilt-cc", source, "-O3", "-o", tmp_path / "other.so"]
    assert f"{source} is not one of the files" in subprocess.run(other, capture_output=True, text=True).stderr
    assert not (tmp_path / "other.so").exists()


WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))["jobs"]


def test_a_release_pushes_every_image_that_the_chart_names() -> None:
    builds = WORKFLOW["images"]["strategy"]["matrix"]["include"]
    version = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"]
    pushed = {f"pipelinerl/{one['service']}:{version}{one['suffix']}" for one in builds} | {
        f"pipelinerl/verifier:{version}-cpu"
    }
    pods = [pod for case in ("default", "cpu") for pod in rendered_case(case).pods]
    named = {container["image"] for pod in pods for container in pod.containers if container["name"] != "nats"}
    assert named <= pushed
    assert len(pushed) == 6


def test_a_released_chart_takes_the_released_images(tmp_path: Path) -> None:
    shutil.copytree(CHART, tmp_path / "deploy" / "helm")
    environment = {**os.environ, "REGISTRY": "ghcr.io/Some/Repository", "PATH": f"{HELM.parent}:{os.environ['PATH']}"}
    (script,) = (one["run"] for one in WORKFLOW["chart"]["steps"] if one.get("name", "").startswith("Images of this registry"))
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=environment, check=True)
    text = (tmp_path / "deploy/helm/values.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text)["images"]["registry"] == "ghcr.io/some/repository"
    assert text.count("ghcr.io/some/repository") == 1
