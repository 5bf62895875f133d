"""Checks images that are there: what is in them, their size, and that the verifier serves on a read-only root and ends in time.

It builds nothing; deploy/images/check.sh does. Runs containers with podman, on the host's network, as the chart runs them
otherwise: read-only root, uid 10001, no capabilities, no new privileges, /tmp in memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import grpc

from pipelinerl.v1 import verifier_pb2, verifier_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
VERIFIER_BYTES = 400_000_000
START_S, STOP_S = 60.0, 15.0

COMPILERS = ("gcc", "cc", "g++", "c++", "clang", "clang++", "cpp", "ld", "as", "make", "nvcc")
NEVER = {"verifier": ("torch", "vllm", "transformers", "pip"), "actor": ("pip",), "trainer": ("pip", "vllm")}
NEEDED = {
    "verifier": ("services.verifier.server", "services.verifier.worker", "services.verifier.episode_worker"),
    "actor": ("services.actor.app", "services.actor.vllm_engine", "services.actor.weight_sync.plugin"),
    "trainer": ("services.trainer.app", "services.trainer.worker", "services.trainer.initial_model"),
}

LOOK = """
import importlib, importlib.util, json, os, shutil, sys
from importlib.metadata import entry_points
from pathlib import Path
compilers, never, needed = json.loads(sys.argv[1])
def writable(folder):
    try:
        (Path(folder) / "written").touch()
    except OSError:
        return False
    return True
for name in needed:
    importlib.import_module(name)
site = next(Path(folder) for folder in sys.path if folder.endswith("site-packages"))
ours = [Path(importlib.import_module(name).__file__) for name in needed]
print(json.dumps({
    "compilers": [name for name in compilers if shutil.which(name)],
    "never": [name for name in never if importlib.util.find_spec(name)],
    "pip_caches": [str(path) for path in Path("/").glob("*/.cache/pip") if path.exists()],
    "uid": os.getuid(), "gid": os.getgid(),
    "writable": [folder for folder in ("/", "/opt", "/etc", "/usr", "/var/tmp", "/tmp") if writable(folder)],
    "without_bytecode": [str(path) for path in ours if not Path(importlib.util.cache_from_source(path)).exists()],
    "plugins": [point.name for point in entry_points(group="vllm.general_plugins")],
    "recipes": sorted(path.stem for path in Path(sys.prefix, "share/pipelinerl/recipes").glob("*.yaml")),
    "python": sys.version.split()[0],
}))
"""


def podman(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["podman", "--cgroup-manager", "cgroupfs", *arguments], capture_output=True, text=True)
    if check and done.returncode != 0:
        sys.exit(f"podman {' '.join(arguments[:3])} ...: exit code {done.returncode}\n{done.stderr}")
    return done.stdout.strip()


def run(image: str, *command: str, options: tuple[str, ...] = ()) -> str:
    runtime = ("--runtime", "runc") if shutil.which("runc") else ()
    rights = ("--read-only", "--read-only-tmpfs=false", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
    # /tmp and shared memory as a pod has them; limits within what the host allows without privileges.
    places = ("--tmpfs", "/tmp", "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096", "--network", "host")
    return podman("run", *runtime, *rights, *places, *options, image, *command)


def size(image: str) -> int:
    """Bytes of all layers, unpacked."""
    return int(podman("image", "inspect", "--format", "{{.Size}}", image))


def check_contents(service: str, image: str) -> None:
    question = json.dumps([COMPILERS, NEVER[service], NEEDED[service]])
    seen = json.loads(run(image, "python", "-c", LOOK, question, options=("--rm",)).splitlines()[-1])
    expected = {
        "compilers": [], "never": [], "pip_caches": [], "without_bytecode": [], "uid": 10001, "gid": 10001,
        "writable": ["/tmp"], "plugins": ["pipelinerl"],
        "recipes": sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")),
    }  # fmt: skip
    seen["plugins"] = [name for name in seen["plugins"] if name == "pipelinerl"]  # vLLM has some of its own
    wrong = {key: seen[key] for key, value in expected.items() if seen[key] != value}
    if wrong:
        sys.exit(f"{image}: {wrong}")
    print(f"{image}: Python {seen['python']}, uid 10001, only /tmp writable, no compiler, none of {NEVER[service]}")


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while True:
        try:
            with urlopen(url, timeout=2):
                return
        except (URLError, OSError) as error:
            if time.monotonic() > end:
                sys.exit(f"{url}: nothing within {deadline_s:g} s: {error}")
        time.sleep(0.1)


def one_reward(address: str) -> verifier_pb2.VerifyResult:
    item = verifier_pb2.VerifyItem(
        sequence_id="1", task="chain_sum", prompt_text="1+2+3+4=", completion_text="3+3+4=6+4=10#10",
        reference_json=json.dumps({"answer": "10", "dataset": "chain_sum", "entry": {"answer": "10", "metadata": {}}}),
    )  # fmt: skip
    with grpc.insecure_channel(address) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        return stub.Verify(verifier_pb2.VerifyRequest(items=[item]), timeout=30).results[0]


def check_serves(image: str, recipe: Path) -> None:
    grpc_port, http_port = free_port(), free_port()
    variables = {
        "RUN": "image-check", "RECIPE": "/etc/pipelinerl/recipe/recipe.yaml", "INSTANCE": "verifier-0",
        "GRPC_PORT": str(grpc_port), "HTTP_PORT": str(http_port),
    }  # fmt: skip
    environment = [word for key, value in variables.items() for word in ("--env", f"PIPELINERL_{key}={value}")]
    mount = ("--volume", f"{recipe.parent}:/etc/pipelinerl/recipe:ro")
    started_s = time.monotonic()
    container = run(image, options=("--detach", *environment, *mount))
    try:
        wait_for(f"http://127.0.0.1:{http_port}/healthz", START_S)
        wait_for(f"http://127.0.0.1:{http_port}/readyz", START_S)
        ready_s = time.monotonic() - started_s
        result = one_reward(f"127.0.0.1:{grpc_port}")
        if result.status != verifier_pb2.VERIFY_STATUS_OK or result.reward != 1.0:
            sys.exit(f"{image}: Verify answered {result}")
        stopping_s = time.monotonic()
        podman("kill", "--signal", "TERM", container)
        code = podman("wait", container)
        stop_s = time.monotonic() - stopping_s
        if code != "0" or stop_s > STOP_S:
            sys.exit(f"{image}: exit code {code}, {stop_s:.1f} s after SIGTERM; 0 within {STOP_S:g} s expected")
        print(f"{image}: ready after {ready_s:.1f} s, reward 1.0, exit code 0 {stop_s:.1f} s after SIGTERM")
    except SystemExit:
        print(podman("logs", container, check=False))
        raise
    finally:
        podman("rm", "--force", container, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("services", nargs="+", choices=sorted(NEEDED))
    parser.add_argument("--tag", required=True)
    parser.add_argument("--base", required=True)
    arguments = parser.parse_args()
    base = size(arguments.base)
    for service in arguments.services:
        image = f"localhost/pipelinerl/{service}:{arguments.tag}"
        total = size(image)
        print(f"{image}: {total / 1e6:.0f} MB unpacked, {base / 1e6:.0f} MB of it the base")
        if service == "verifier" and total >= VERIFIER_BYTES:
            sys.exit(f"{image}: {total} bytes; under {VERIFIER_BYTES} expected")
        check_contents(service, image)
    if "verifier" in arguments.services:
        with tempfile.TemporaryDirectory() as folder:
            recipe = Path(folder, "recipe.yaml")
            recipe.write_bytes((ROOT / "recipes" / "arithmetic.yaml").read_bytes())
            Path(folder).chmod(0o755)
            check_serves(f"localhost/pipelinerl/verifier:{arguments.tag}", recipe)


if __name__ == "__main__":
    main()
