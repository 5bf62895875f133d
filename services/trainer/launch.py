"""Start the trainer's ranks on this node under torchrun's elastic agent, and wait for them to end. If a rank dies, the
agent sends SIGTERM to the other ranks of this node. Ranks of all nodes fail at their next communication with a dead rank."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipelinerl.errors import EXIT_FAILURE, EXIT_OK, FieldError, how_ended
from pipelinerl.local.die_with_parent import guarded
from pipelinerl.local.services import keep_to_quota
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.lifecycle import exit_code
from pipelinerl.service.logs import LogContext, configure_logging, take_over
from pipelinerl.service.settings import TrainerSettings, read_settings

log = logging.getLogger(__name__)

SHUTDOWN_S = 30
"""Seconds from the signal to stop until the ranks are killed, in addition to the time for the last checkpoint."""
RENDEZVOUS_TIMEOUT_S = 900
"""Maximum seconds that a node waits for the other nodes, which may have to pull images first."""


def launch_ranks() -> int | None:
    """Run this node's ranks until they end, and return the exit code. Return None at once if there is only one rank."""
    codes: list[int | None] = []

    def launch() -> None:
        settings = read_settings(TrainerSettings)
        recipe = load_recipe(settings.recipe)
        several = num_ranks(settings, recipe) > 1
        here = settings.ranks_per_node or recipe.trainer.ranks
        keep_to_quota(os.environ, here)
        codes.append(run_ranks(settings, here, (sys.executable, "-m", "services.trainer")) if several else None)

    failed = exit_code(launch)
    return failed or codes[0]


def num_ranks(settings: TrainerSettings, recipe: Recipe) -> int:
    """Return the number of ranks on all nodes. Raises `FieldError` if a rendezvous is missing or the node number is wrong."""
    if settings.nodes > 1 and not settings.rendezvous:
        raise FieldError("PIPELINERL_RENDEZVOUS", "", "with several nodes, set it to host:port of node 0")
    if settings.node >= settings.nodes:
        fix = f"must be 0 to {settings.nodes - 1} for PIPELINERL_NODES = {settings.nodes}"
        raise FieldError("PIPELINERL_NODE", settings.node, fix)
    return settings.nodes * (settings.ranks_per_node or recipe.trainer.ranks)


def run_ranks(settings: TrainerSettings, num_here: int, command: tuple[str, ...]) -> int:
    """Run `command` once for each of this node's ranks, under torchrun. Return the exit code of the first failed rank, 1 if a
    signal killed it, or 0 if none failed. A signal to this process is passed to the ranks, and is not a failure."""
    context = LogContext(settings.run, "trainer", settings.instance)
    configure_logging(context, log_format=settings.log_format, level=settings.log_level)
    take_over("torch")
    for name in ("agent.server", "multiprocessing.api"):  # they log the end of every rank
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="prl-", ignore_cleanup_errors=True) as folder:
        return _run_agent(settings, num_here, command, Path(folder))


def _run_agent(settings: TrainerSettings, num_here: int, command: tuple[str, ...], folder: Path) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    meeting: dict[str, Any]
    if settings.nodes == 1:  # meet in a folder and use loopback, since torch's store listens on all interfaces
        os.environ["RANK_FOLDER"] = str(folder)
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # otherwise torch starts that store anyway
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": str(folder / "agent"), "rdzv_configs": {"store_type": "file"}}
    else:  # meet at node 0, which has rank 0
        meeting = {"rdzv_backend": "static", "rdzv_endpoint": settings.rendezvous}
        meeting["rdzv_configs"] = {"rank": settings.node, "timeout": RENDEZVOUS_TIMEOUT_S}
    config = LaunchConfig(
        min_nodes=settings.nodes,
        max_nodes=settings.nodes,
        nproc_per_node=num_here,
        run_id=settings.run,
        local_addr="127.0.0.1" if settings.nodes == 1 else settings.advertise_host,
        max_restarts=0,
        monitor_interval=0.2,
        shutdown_timeout=math.ceil(settings.stop_checkpoint_s) + SHUTDOWN_S,
        **meeting,
    )
    program, *arguments = guarded(command, signal.SIGKILL)
    try:
        elastic_launch(config, program)(*arguments)
    except SignalException as stopped:
        log.info("stopped on signal %s", stopped.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        why = "; the kernel does that when memory runs out" if failure.exitcode == -signal.SIGKILL else ""
        problem = (
            f"error: rank {rank} of the trainer was killed by {how_ended(failure.exitcode)}{why}. A restarted trainer "
            "continues from the newest checkpoint and repeats the steps since then; to repeat fewer, lower "
            "checkpoint.every_steps"
        )
        print(problem, file=sys.stderr)
        return EXIT_FAILURE
    return EXIT_OK
