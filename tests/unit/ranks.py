"""Several ranks of a learner, each in a process of its own; what they do, and what a test wants to know of them."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from pipelinerl.recipe.fields import Recipe
from tests.unit.builders import make_recipe

PROCESSES = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
"""A fork server imports torch and what a learner needs once for all of them. CUDA works in no fork of a process whose imports
have asked for devices, as those of transformers do."""
PROCESSES.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen2.modeling_qwen2",
        "services.trainer.loading",
        "services.trainer.worker",
        "tests.unit.test_learner",
    ]
)
WAIT_S = 500.0
"""A rank that dies is noticed at once; one that hangs, after this long. Four of them share two busy cores with other tests."""


UNEVEN = [(2, 9), (5, 3), (1, 1), (4, 47), (3, 2), (6, 8), (2, 20), (1, 5)]
"""(prompt, completion) tokens of each sequence of a step."""


@dataclass(frozen=True)
class Job:
    """Two optimizer steps of a model in `folder`."""

    folder: str
    trainer: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[tuple[int, int], ...] = tuple(UNEVEN)
    model: dict[str, Any] = field(default_factory=dict)
    broken: bool = False
    """The first step has a sequence whose advantage is not a number."""
    episodes: bool = False
    """Instead of sequences of `lengths`."""
    groups: int = 1
    """Of a prompt each, where there are several; every second one has advantages of 0."""

    def recipe(self) -> Recipe:
        # AdamW divides by the size of the gradient: with its usual epsilon it makes steps of rounding errors of tiny ones.
        usual = {"learning_rate": 1e-2, "tokens_per_microbatch": 64, "max_grad_norm": 0.5, "epsilon": 1e-3}
        trainer = usual | self.trainer
        model = {"source": "path", "name": self.folder, "max_context": 64} | self.model
        return make_recipe(model=model, trainer=trainer, algorithm=self.algorithm)


Cases = dict[str, tuple[str, dict[str, Any]]]
"""By name: a model of `jobs_of`, and what its `Job` has beside the folder."""


def jobs_of(cases: Cases, tmp_path_factory: Any) -> dict[str, Job]:
    from tests.support.learner import model_of

    folders: dict[str, str] = {}
    for family, _ in cases.values():
        if family not in folders:
            folders[family] = str(tmp_path_factory.mktemp(family))
            model_of(family, max_position_embeddings=64).save_pretrained(folders[family])
    return {name: Job(folders[family], **changes) for name, (family, changes) in cases.items()}


def on_ranks(size: int, role: Callable[..., Any], *arguments: Any, wait_s: float = WAIT_S) -> list[Any]:
    """What `role(*arguments)` returns on each of `size` ranks, whose environment is the one that torchrun gives.

    `role` is a function of a module. Raises AssertionError with the traceback of the first rank that fails.
    """
    folder, started = tempfile.TemporaryDirectory(prefix="prl-"), []
    for rank in range(size):
        ours, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=_play, args=(theirs, rank, size, folder.name, role, arguments), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        results = [_heard(rank, said, wait_s) for rank, (_, said) in enumerate(started)]
    finally:
        for process, said in started:
            process.kill()
            process.join()
            said.close()
        folder.cleanup()
    return results


def saved_beside(saver: Any, folder: Path) -> Future[None]:
    """`StateSaver` stages a state of all ranks, which another thread writes."""
    saver.stage()
    return ThreadPoolExecutor(max_workers=1).submit(saver.write, folder)


def _heard(rank: int, said: Connection, wait_s: float) -> Any:
    assert said.poll(wait_s), f"rank {rank} says nothing within {wait_s:g} s"
    good, result = said.recv()
    assert good, f"rank {rank} failed:\n{result}"
    return result


def _play(said: Connection, rank: int, size: int, folder: str, role: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), RANK_FOLDER=folder, GLOO_SOCKET_IFNAME="lo")
    import torch

    torch.set_num_threads(1)
    try:
        said.send((True, role(*arguments)))
    except BaseException:  # noqa: BLE001 - a process boundary: the test raises it
        said.send((False, traceback.format_exc()))
    said.poll(WAIT_S)  # the groups live until the test has heard everybody
