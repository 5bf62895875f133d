"""Ranks under torchrun's agent: they meet within and across nodes, and end together, however one of them or the agent ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.errors import FieldError
from pipelinerl.service.settings import TrainerSettings
from services.trainer.launch import num_ranks
from tests.support.machine import ends_within, free_port
from tests.unit.builders import make_recipe

AGENT = """
import json, sys
from pathlib import Path
from pipelinerl.service.settings import TrainerSettings
from services.trainer.launch import run_ranks
if __name__ == "__main__":
    settings, num_here, worker = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    sys.exit(run_ranks(TrainerSettings(**settings), num_here, (sys.executable, worker)))
"""
SUM_OF_RANKS = """
import os, psutil, torch, torch.distributed as dist
from services.trainer.world import join_ranks
join_ranks(torch.device("cpu"))
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
listens = sorted({one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN})
os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():.0f} at {listens}\\n".encode())
dist.destroy_process_group()
"""
RANK_1_FAILS = "import os, sys, time\nsys.exit(2) if os.environ['RANK'] == '1' else time.sleep(600)"
LISTENS = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
open(f"{sys.argv[0]}.met.{dist.get_rank()}.{os.getppid()}", "x").close()
word = torch.zeros(1)
try:
    while True:
        if dist.get_rank() == 0:
            dist.send(word, 1)
            time.sleep(0.05)
        else:
            dist.recv(word, 0)
except RuntimeError:
    os._exit(1)
"""
WAITS = "import os, time\nos.write(1, f'pid {os.getpid()}\\n'.encode())\ntime.sleep(600)"
WAIT_S = 120.0


def settings(**changes: Any) -> dict[str, Any]:
    base = {"run": "r", "recipe": "recipe.yaml", "instance": "trainer", "run_dir": "."}
    return base | changes


Agents = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start_agent(tmp_path: Path) -> Iterator[Agents]:
    """Starts an agent with so many ranks that run `worker`; whatever is left at the end is killed."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "agent.py").write_text(AGENT)

    def start(worker: str, num_here: int, **changes: Any) -> subprocess.Popen[str]:
        (tmp_path / "worker.py").write_text(worker)
        arguments = [str(tmp_path / "agent.py"), json.dumps(settings(**changes)), str(num_here), str(tmp_path / "worker.py")]
        started.append(
            subprocess.Popen(
                [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for agent in started:
        agent.kill()
        agent.communicate()


def test_the_ranks_of_one_node_listen_on_loopback_only_and_meet_in_a_folder_that_is_gone_afterwards(
    start_agent: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")  # as another program of the user may need it
    agent = start_agent(SUM_OF_RANKS, 2)
    said = sorted(agent.communicate(timeout=WAIT_S)[0].splitlines())
    assert said == ["rank 0 of 2: 3 at ['127.0.0.1']", "rank 1 of 2: 3 at ['127.0.0.1']"]
    assert agent.returncode == 0
    assert not list(tmp_path.glob("prl-*"))


def test_two_nodes_meet_again_in_the_same_place_when_one_is_lost(start_agent: Agents, tmp_path: Path) -> None:
    rendezvous = f"127.0.0.1:{free_port()}"

    def start(node: int) -> subprocess.Popen[str]:
        return start_agent(LISTENS, 1, nodes=2, node=node, rendezvous=rendezvous)

    def until_met(times: int) -> None:
        latest = time.monotonic() + WAIT_S
        while {len(list(tmp_path.glob(f"worker.py.met.{rank}.*"))) for rank in (0, 1)} != {times}:
            assert time.monotonic() < latest
            for node in nodes:
                if (code := nodes[node].poll()) is not None:
                    # The one that was killed also fails if it met the other again before that one had noticed.
                    assert code in ((-signal.SIGKILL, 1) if node == lost else (1,))
                    nodes[node] = start(node)
            time.sleep(0.05)
        assert all((tmp_path / f"worker.py.met.{node}.{agent.pid}").exists() for node, agent in nodes.items())

    nodes, lost = {node: start(node) for node in (0, 1)}, -1
    until_met(1)
    for times, lost in enumerate((1, 0), start=2):
        nodes[lost].kill()
        until_met(times)


def test_the_exit_code_is_that_of_the_rank_that_failed_first(start_agent: Agents) -> None:
    agent = start_agent(RANK_1_FAILS, 2)
    agent.communicate(timeout=WAIT_S)
    assert agent.returncode == 2


@pytest.mark.parametrize(("number", "code", "within_s"), [(signal.SIGTERM, 0, 0.0), (signal.SIGKILL, -signal.SIGKILL, WAIT_S)])
def test_ranks_do_not_outlive_their_agent(start_agent: Agents, number: int, code: int, within_s: float) -> None:
    agent = start_agent(WAITS, 2)
    pids = [int(agent.stdout.readline().split()[1]) for _ in range(2)]
    agent.send_signal(number)
    assert agent.wait(WAIT_S) == code
    assert all(ends_within(pid, within_s) for pid in pids), "a rank outlives its agent"


def test_ranks_of_all_nodes_are_counted_and_nodes_need_a_place_to_meet() -> None:
    recipe = make_recipe(trainer={"batch_size": 4, "tokens_per_microbatch": 64, "nproc": 2})
    assert num_ranks(TrainerSettings(**settings()), recipe) == 2
    assert num_ranks(TrainerSettings(**settings(ranks_per_node=4, nodes=3, rendezvous="a:1")), recipe) == 12
    with pytest.raises(FieldError, match="PIPELINERL_RENDEZVOUS"):
        num_ranks(TrainerSettings(**settings(nodes=2)), recipe)
    with pytest.raises(FieldError, match=r"PIPELINERL_NODE = 2: must be 0 to 1 for PIPELINERL_NODES = 2"):
        num_ranks(TrainerSettings(**settings(nodes=2, node=2, rendezvous="a:1")), recipe)
