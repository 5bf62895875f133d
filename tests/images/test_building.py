"""The scripts around a build: what they ask of a builder, pass on of pip's settings, and put in a compiler's place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deploy.images import bytecode, local_pip
from tests.images.dockerfile import ROOT

IMAGES = ROOT / "deploy" / "images"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture
def builder(tmp_path: Path) -> Path:
    """A `docker` that writes down its arguments, one call a line."""
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n')
    docker.chmod(0o755)
    return tmp_path


def build(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), "REVISION": "abc", **variables}
    return subprocess.run([IMAGES / "build.sh"], env=environment, capture_output=True, text=True)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_cuda_images_are_tagged_with_the_version(builder: Path) -> None:
    assert build(builder).returncode == 0
    actor, trainer, verifier = calls(builder)
    assert f"--tag pipelinerl/actor:{VERSION} " in actor
    assert "--build-arg FLAVOUR=cuda" in actor
    assert "--build-arg FLAVOUR=cuda" in trainer
    assert "FLAVOUR" not in verifier
    assert "BASE_IMAGE" not in actor + trainer + verifier
    assert all(f"--build-arg VERSION={VERSION} --build-arg REVISION=abc" in call for call in (actor, trainer, verifier))


def test_cpu_images_share_the_verifiers_base_and_end_in_cpu(builder: Path) -> None:
    assert build(builder, FLAVOUR="cpu", REGISTRY="registry.example.org", TAG="7").returncode == 0
    actor, _, verifier = calls(builder)
    assert "--tag registry.example.org/pipelinerl/actor:7-cpu " in actor
    assert "--build-arg BASE_IMAGE=debian:" in actor
    assert "verifier:7 " in verifier
    assert "verifier:7-cpu " in verifier


def test_a_cuda_base_of_ones_own_is_not_the_verifiers(builder: Path) -> None:
    assert build(builder, BASE_IMAGE="example/cuda:1", SERVICES="trainer verifier").returncode == 0
    trainer, verifier = calls(builder)
    assert "BASE_IMAGE=example/cuda:1" in trainer
    assert "BASE_IMAGE" not in verifier


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FLAVOUR": "rocm"}, "FLAVOUR = 'rocm': use cuda or cpu"),
        ({"ENGINE": "no-such-builder"}, "no-such-builder not found; install one"),
    ],
)
def test_what_cannot_be_built_is_said(builder: Path, variables: dict[str, str], message: str) -> None:
    done = build(builder, **variables)
    assert done.returncode == 1
    assert message in done.stderr


PIP_THAT_FINDS_TORCH = """#!/bin/sh
[ "$1" = -c ] && exit {installed}
echo "$@" >>{calls}
case "$*" in *--index-url*) exit {at_index} ;; *) echo "no such build" >&2; exit {anyway} ;; esac
"""


@pytest.mark.parametrize(
    ("anyway", "at_index", "index", "said"),
    [
        (0, 0, "", "found where pip looks anyway"),
        (1, 0, "", "found at https://download.pytorch.org/whl/cpu"),
        (1, 0, "https://mirror.example/cpu", "found at https://mirror.example/cpu"),
        (1, 1, "", "neither where pip looks anyway nor at https://download.pytorch.org/whl/cpu. Name an index"),
    ],
)
def test_torch_for_cpu_comes_from_pips_index_or_else_from_pytorchs(
    tmp_path: Path, anyway: int, at_index: int, index: str, said: str
) -> None:
    python, asked = tmp_path / "python", tmp_path / "calls"
    python.write_text(PIP_THAT_FINDS_TORCH.format(installed=1, calls=asked, anyway=anyway, at_index=at_index))
    python.chmod(0o755)
    command = [IMAGES / "install_torch.sh", ROOT / "requirements" / "cpu.txt", python, "--no-compile"]
    done = subprocess.run(command, env={**os.environ, "TORCH_INDEX": index}, capture_output=True, text=True)

    assert said in done.stdout + done.stderr
    assert done.returncode == (anyway and at_index)
    assert ("no such build" in done.stderr) == bool(done.returncode)
    first, *others = asked.read_text().splitlines()
    assert first.startswith("-m pip install --no-deps --no-compile torch==2.")
    assert first.endswith("+cpu")
    assert len(others) == (1 if anyway else 0)


def test_torch_for_cpu_that_is_there_is_left_alone(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PIP_THAT_FINDS_TORCH.format(installed=0, calls=tmp_path / "calls", anyway=0, at_index=0))
    python.chmod(0o755)
    subprocess.run([IMAGES / "install_torch.sh", ROOT / "requirements" / "cpu.txt", python], check=True)
    assert not (tmp_path / "calls").exists()


def test_the_installation_leaves_pips_log_out() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "PIP := $(BIN)/python -m pip --quiet --quiet" in makefile
    installs = [line for line in makefile.splitlines() if "pip install" in line or "install_torch.sh" in line]
    assert [line for line in installs if "--quiet" not in line] == []


def test_pips_settings_go_into_the_build_with_the_folders_they_name(tmp_path: Path) -> None:
    (tmp_path / "index" / "simple").mkdir(parents=True)
    certificates = tmp_path / "ca.crt"
    certificates.touch()
    listing = (
        f":env:.cert='{certificates}'\n"
        "global.cert='/overridden'\n"
        f"global.extra-index-url='file://{tmp_path}/index/simple https://example.org/simple'\n"
        "global.no-color='true'\n"
    )
    found = local_pip.settings(listing)

    assert local_pip.config(found) == (
        "[global]\n"
        f"extra-index-url = file://{tmp_path}/index/simple https://example.org/simple\n"
        f"cert = {local_pip.CERTIFICATES}\n"
    )
    assert local_pip.volumes(found) == [
        f"{certificates}:{local_pip.CERTIFICATES}:ro",
        f"{tmp_path}/index:{tmp_path}/index:ro",
    ]


needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on this machine")


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment's shape, with the Triton of this one."""
    triton = pytest.importorskip("triton")
    site = tmp_path / "environment" / "lib" / "python3" / "site-packages"
    site.mkdir(parents=True)
    (site / "triton").symlink_to(Path(triton.__file__).parent)
    bin_folder = tmp_path / "environment" / "bin"
    bin_folder.mkdir()
    shutil.copy(IMAGES / "prebuilt-cc", bin_folder)
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run([IMAGES / "prebuild_cc.sh", tmp_path / "environment"], env=variables, check=True)
    return tmp_path / "environment"


@needs_gcc
def test_triton_builds_its_driver_where_no_compiler_is(environment: Path, tmp_path: Path) -> None:
    """By Triton's own code, in a process of its own: Triton looks for its compiler once."""
    program = (
        "from triton.backends.nvidia import driver as d; from triton.runtime.build import compile_so_from_file as c\n"
        "print(c(d.dirname + '/driver.c', 'cuda_utils', [d.libdevice_dir], d.include_dirs, d.libraries))"
    )
    # Triton loads what was compiled: with an empty library in the driver's place
    stub = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", stub], check=True)
    variables = {
        "CC": str(environment / "bin" / "prebuilt-cc"),
        "PATH": "/usr/bin:/bin",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "LD_LIBRARY_PATH": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (prebuilt,) = (environment / "lib" / "prebuilt-cc").glob("*.so")
    assert Path(done.stdout.strip()).read_bytes() == prebuilt.read_bytes()


def test_another_source_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    shutil.copy(IMAGES / "prebuilt-cc", tmp_path / "bin")
    source = tmp_path / "other.c"
    source.write_text("int main(void) { return 0; }")
    command = [tmp_path / "bin" / "prebuilt-cc", source, "-O3", "-o", tmp_path / "other.so"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"no C compiler, and {source} is not one of the files" in done.stderr
    assert not (tmp_path / "other.so").exists()


def test_bytecode_of_what_is_loaded_needs_no_source_to_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop" / "tests").mkdir(parents=True)
    (tmp_path / "shop" / "__init__.py").write_text("from shop import till\n")
    (tmp_path / "shop" / "till.py").write_text("open = True\n")
    (tmp_path / "shop" / "cellar.py").write_text("dark = True\n")
    (tmp_path / "shop" / "fast.pyx").touch()
    monkeypatch.setattr(bytecode, "SITE", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    bytecode.remove_unread()
    bytecode.compile_loaded(["shop"])
    for name in ("shop", "shop.till"):
        monkeypatch.delitem(sys.modules, name)

    compiled = sorted(path.name.split(".")[0] for path in tmp_path.rglob("*.pyc"))
    assert compiled == ["__init__", "till"]
    # PEP 552: flags 0b01 = checked by nobody
    flags = {path.read_bytes()[4:8] for path in tmp_path.rglob("*.pyc")}
    assert flags == {b"\x01\x00\x00\x00"}
    assert sorted(path.name for path in (tmp_path / "shop").iterdir() if path.name != "__pycache__") == [
        "__init__.py",
        "cellar.py",
        "till.py",
    ]
