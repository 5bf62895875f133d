"""What a checkpoint costs training: the time of 20 steps with one among them beside that of 20 without, in turn in one run.

After the first of its steps a round begins a checkpoint as the trainer does (state and export staged while nothing is computed,
then written, synced and renamed by a thread of its own beside the other steps), and ends when steps and checkpoint are done.
`ratio` is the time without by that with a checkpoint, the median over pairs of neighbouring rounds; `ratio_best` compares the
fastest round of each, `ratio_cpu_time` the processor time of both. On a machine that does other work, trust the last two.
`blocking_ms` is how long the steps wait for staging, `writing_s` what goes on beside them, `restore_s` how long a new learner
takes to read the state back from a disk that has it in memory.

Not measured here: several ranks, GPUs, a slow disk, and what the event loop does for a checkpoint (copies of small objects).

    python -m benchmarks.checkpoint [--pairs 12] [--only tiny] [--folder DIR] [--output FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.loops_in_turn import compared, in_turn
from benchmarks.random_models import build_smollm2_shape, build_tiny
from benchmarks.result_files import kept_cases, write_result
from benchmarks.training_data import VERSION, make_groups, uniform_lengths
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.settings import RankSettings
from services.trainer.checkpoint.checkpointer import WrittenCheckpoint, write_checkpoint
from services.trainer.checkpoint.run_state import RunState
from services.trainer.checkpoint.state_files import restore
from services.trainer.data.intake import HeldSequences
from services.trainer.learn.batch import TrainingGroup
from services.trainer.loading import load_learner, load_tokenizer
from services.trainer.loop import PolicyTrainer

RESULT = Path(__file__).parent / "results" / "checkpoint.json"
EVERY_STEPS = 20
RATIOS = ("ratio", "ratio_best", "ratio_cpu_time", "pairs")
MIB = 1024**2


@dataclass(frozen=True)
class Case:
    """One model and batch."""

    build: Callable[[Recipe, Path], None]
    batch_size: int
    lengths: tuple[int, int]
    """Of whole sequences, uniform, both ends included."""
    tokens_per_microbatch: int
    pairs: int
    """Rounds of each kind that are timed, unless the command line says how many."""
    goal: float | None = None
    """Of `ratio`."""

    def recipe(self, folder: Path) -> Recipe:
        """The default one, with the model in `folder`."""
        recipe = load_recipe("arithmetic")
        model = recipe.model.model_copy(update={"source": "path", "name": str(folder)})
        sizes = {"batch_size": self.batch_size, "tokens_per_microbatch": self.tokens_per_microbatch}
        changes = {**sizes, "learning_rate": 1e-6}  # random data is not to be learnt
        return recipe.model_copy(update={"model": model, "trainer": recipe.trainer.model_copy(update=changes)})


CASES = {
    "tiny": Case(build_tiny, 128, (15, 60), 2048, pairs=12, goal=0.98),  # at most 2 % of the time of the steps
    "smollm2": Case(build_smollm2_shape, 8, (15, 60), 512, pairs=2),
}


@dataclass
class Rounds:
    """Rounds of `EVERY_STEPS` steps of one trainer, with a checkpoint each or without."""

    trainer: PolicyTrainer
    recipe: Recipe
    groups: list[TrainingGroup]
    run_dir: Path
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    version: int = VERSION
    blocking_s: list[float] = field(default_factory=list)
    writing_s: list[float] = field(default_factory=list)
    folder: Path = Path()
    """Of the last checkpoint."""

    def without(self) -> None:
        for _ in range(EVERY_STEPS):
            self._step()

    def with_one(self) -> None:
        self._step()
        began_s = time.perf_counter()
        write_tensors = self.trainer.begin_checkpoint(self.version)
        self.blocking_s.append(time.perf_counter() - began_s)
        job: Future[WrittenCheckpoint] = self.thread.submit(write_checkpoint, self.run_dir, 2, write_tensors, self._state())
        for _ in range(EVERY_STEPS - 1):
            self._step()
        written = job.result()
        self.writing_s.append(written.seconds)
        self.folder = written.folder

    def _step(self) -> None:
        self.trainer.step(self.trainer.learner.prepare(self.groups, self.version))
        self.version += 1

    def _state(self) -> RunState:
        """As of a trainer that holds the next batch."""
        return RunState(
            run="benchmark",
            policy_version=self.version,
            recipe=self.recipe.model_dump(mode="json"),
            journal_bytes=0,
            tracker={},
            next_group=0,
            position=0,
            held=HeldSequences(taken=tuple(self.groups)),
        )


def run_case(case: Case, pairs: int, parent: Path) -> dict[str, Any]:
    """Measures one case in a folder of its own below `parent`."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        recipe = case.recipe(folder / "model")
        case.build(load_recipe("arithmetic"), folder / "model")
        rounds = rounds_of(case, recipe, folder)
        rounds.with_one()  # whose memory is new
        first_s, rounds.blocking_s, rounds.writing_s = rounds.blocking_s[0], [], []
        timings = in_turn(rounds.with_one, rounds.without, pairs)
        found = compared(timings, 0)
        return {
            "parameters": sum(weight.numel() for weight in rounds.trainer.learner.policy.model.parameters()),
            **{key: found[key] for key in RATIOS},
            "goal": case.goal,
            "step_s": statistics.median(timing.wall_s for timing in timings.bare) / EVERY_STEPS,
            "blocking_ms": 1000 * statistics.median(rounds.blocking_s),
            "first_blocking_ms": 1000 * first_s,
            "writing_s": statistics.median(rounds.writing_s),
            "restore_s": restore_s(recipe, rounds.folder / "resume" / "state"),
            "state_mib": size_mib(rounds.folder / "resume"),
            "export_mib": size_mib(rounds.folder) - size_mib(rounds.folder / "resume"),
            "load_before": round(load, 2),
        }


def rounds_of(case: Case, recipe: Recipe, folder: Path) -> Rounds:
    """A trainer that sends nothing."""
    nothing: Any = None
    learner = load_learner(recipe, recipe.model.name, RankSettings())
    trainer = PolicyTrainer(learner, load_tokenizer(recipe.model.name, recipe), nothing, recipe)
    groups = make_groups(uniform_lengths(*case.lengths, case.batch_size), trainer.vocab_size)
    return Rounds(trainer, recipe, groups, folder)


def restore_s(recipe: Recipe, folder: Path) -> float:
    learner = load_learner(recipe, recipe.model.name, RankSettings())
    began_s = time.perf_counter()
    restore(learner, folder)
    return time.perf_counter() - began_s


def size_mib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=0, help="Rounds of each kind that are timed; 0 = the case's.")
    parser.add_argument("--only", choices=list(CASES), help="One case; the results of the others are kept.")
    parser.add_argument("--folder", type=Path, default=Path(), help="On the disk that is to be measured.")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    kept = kept_cases(arguments.output, CASES)
    for name in [arguments.only] if arguments.only else CASES:
        kept[name] = run_case(CASES[name], arguments.pairs or CASES[name].pairs, arguments.folder)
        print(name, json.dumps(kept[name], indent=2), flush=True)
        write(arguments.output, kept)
        gc.collect()


def write(path: Path, cases: dict[str, Any]) -> None:
    result = {
        "benchmark": "checkpoint",
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "every_steps": EVERY_STEPS,
        "cases": {name: cases[name] for name in CASES if name in cases},
    }
    write_result(path, result)


if __name__ == "__main__":
    main()
