"""`python -m services.trainer.transfer_test`: one pod sends bytes to another as a trainer sends weights to an actor.

`helm test` runs this in two pods of the trainer's image if `test.transferPair.enabled` is set. They use the backend, network
interface and chunk size of the run. Pod 0 broadcasts known bytes; pod 1 checks them. The run is not contacted.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch.distributed import DistError, TCPStore

from pipelinerl.errors import PipelineRLError, TransferError
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.settings import host_port
from pipelinerl.transfer.group import HOST, GroupStore, Placement, WeightGroup, on_device, transfer_backend
from pipelinerl.transfer.manifest import Backend, GroupSpec, chunk_size

TOTAL_BYTES = 2**30  # about ten seconds at 1 Gbit/s


def meet(options: argparse.Namespace, host: str, backend: Backend, placement: Placement) -> WeightGroup:
    spec = GroupSpec(host_port(host, options.port), "pair", options.index, 2, backend, options.own_host)
    try:
        return WeightGroup.connect(spec, options.within, placement=placement)
    except TransferError as error:
        other = f"pod {1 - options.index}"
        hint = f"is {other} running, and can both pods reach each other on every TCP port, first on {spec.store}?"
        raise TransferError(f"meeting {other}: {error}; {hint}") from error


def send(group: WeightGroup, chunk_bytes: int, within_s: float) -> float:
    """Rank 0: broadcast about `TOTAL_BYTES`. Rank 1: receive and check them. Return GB/s. Raises `TransferError` on failure."""
    end, sends = time.monotonic() + within_s, group.spec.rank == 0
    began_at = time.monotonic()
    rounds = max(TOTAL_BYTES // chunk_bytes, 2)
    with group.placement.scope():
        wanted = torch.arange(chunk_bytes // 4, dtype=torch.int32, device=group.placement.device)
        chunk = wanted.clone() if sends else torch.zeros_like(wanted)
        for number in range(1, rounds + 1):
            try:
                group.broadcast(chunk.add_(1) if sends else chunk, max(end - time.monotonic(), 0.001))
            except TransferError as error:
                raise TransferError(f"transfer: broadcast {number} of {rounds}: {error}") from error
            if not sends and not torch.equal(chunk, wanted.add_(1)):
                raise TransferError(f"transfer: broadcast {number} of {rounds} arrived with wrong bytes")
    return rounds * chunk_bytes / (time.monotonic() - began_at) / 1e9


def acknowledge(index: int, host: str, port: int, within_s: float) -> None:
    """Pod 1: report that all bytes have arrived. Pod 0: wait for that report. Raises `TransferError` if this fails."""
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=within_s))
        if index:
            store.set("received", "")
        else:
            store.wait(["received"], timedelta(seconds=within_s))
    except (DistError, RuntimeError) as error:
        fault = f"this pod cannot report success: {error}" if index else "pod 1 has not reported success; see its log"
        raise TransferError(f"end: {fault}") from error


def pair(options: argparse.Namespace) -> None:
    """Run the test as pod `options.index`. Raises `TransferError`, `UserError` or, if the port is taken, `OSError`."""
    say = partial(print, flush=True)
    recipe, on_gpu = load_recipe(options.recipe), options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise TransferError("GPU: the pod requests one but sees none: check the device plugin and the node's driver")
    backend = transfer_backend(recipe.weights.backend, on_gpu=on_gpu)
    placement = on_device(torch.device("cuda", 0)) if backend == "nccl" else HOST
    index, port, within_s = options.index, options.port, options.within
    say(f"ok      device: {placement.device}, backend {backend}")
    store = GroupStore(options.own_host, port) if index == 0 else None
    host = store.host if store else options.host
    group = meet(options, host, backend, placement)
    say(f"ok      meeting pod {1 - index}")
    rate = send(group, chunk_size(recipe.weights.chunk_mib, backend), within_s)
    say(f"ok      transfer: {rate:.2f} GB/s")
    acknowledge(index, host, port, within_s)
    group.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m services.trainer.transfer_test", description=__doc__)
    parser.add_argument("--index", type=int, choices=(0, 1), required=True, help="number of this pod; pod 0 sends")
    parser.add_argument("--host", required=True, help="name of pod 0")
    parser.add_argument("--own-host", required=True, metavar="ADDRESS", help="address of this pod")
    parser.add_argument("--port", type=int, default=29400, help="port of pod 0, where both meet")
    parser.add_argument("--recipe", type=Path, default=Path("/etc/pipelinerl/recipe/recipe.yaml"))
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True, help="device that the pod requests")
    parser.add_argument("--within", type=float, default=300.0, metavar="SECONDS", help="time limit for meeting and sending")
    options = parser.parse_args(arguments)
    try:
        pair(options)
    except (PipelineRLError, OSError) as error:
        print(f"FAILED  {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
