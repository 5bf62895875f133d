"""The pair of `helm test`: two processes send each other bytes over Gloo, and each names what fails, within its time."""

import asyncio
import os
import sys

import pytest

from services.trainer.transfer_test import main
from tests.chart.rendering import ROOT
from tests.kube.test_release_test import unused


def arguments(index: int, address: str, device: str = "cpu", within_s: float = 60) -> list[str]:
    host, _, port = address.rpartition(":")
    recipe = ROOT / "recipes" / "arithmetic.yaml"
    return [
        *(f"--index={index}", f"--host={host}", f"--port={port}", f"--own-host={host}", f"--recipe={recipe}"),
        *(f"--device={device}", f"--within={within_s}"),
    ]


async def pod(index: int, address: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.trainer.transfer_test", *arguments(index, address)),
        env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
    )
    said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said
    steps = [line.partition(":")[0] for line in said.splitlines()]
    assert steps == ["ok      device", f"ok      meeting pod {1 - index}", "ok      transfer"]


async def test_two_pods_send_each_other_the_bytes() -> None:
    address = unused()
    await asyncio.gather(pod(0, address), pod(1, address))


def test_a_pod_that_is_alone_or_has_no_gpu_says_so_within_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    for index, device, what in (
        (0, "cpu", "meeting pod 1: weight group pair: connecting 2 ranks ([1] are missing) took longer than "),
        (1, "cpu", "meeting pod 0: weight group pair: "),  # in one of three ways, by torch's random pauses
        (0, "cuda", "GPU: the pod requests one but sees none"),
    ):
        address = unused()
        assert main(arguments(index, address, device, within_s=6)) == 1
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
        assert what in line
        asked = f"; is pod {1 - index} running, and can both pods reach each other on every TCP port, first on {address}?"
        assert device == "cuda" or line.endswith(asked)
