"""`python -m services.trainer.replay`: compute recorded optimizer steps again, and compare the digests of the weights.

`pipelinerl replay` starts this in the trainer's environment. The steps are computed with the run's number of threads and by the
same code as in the run: `Learner.prepare` and `PolicyTrainer.step`. Overrides change the loss, mask or optimizer for the same
data. `pipelinerl rollback` starts it to write a checkpoint of a version that has none.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipelinerl.audit.journal import JOURNAL
from pipelinerl.audit.replay import Findings, events, read_history
from pipelinerl.errors import FieldError, ServiceError
from pipelinerl.initial_model import model_source
from pipelinerl.messages.sequences import Branch, PolicyVersion
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe, recipe_from_data
from pipelinerl.run_dir import resumable
from pipelinerl.run_summary import read_jsonl
from pipelinerl.service.lifecycle import exit_code
from pipelinerl.service.logs import printable
from pipelinerl.service.settings import RankSettings, TrainerSettings, read_settings
from services.trainer.checkpoint.checkpointer import write_checkpoint
from services.trainer.checkpoint.run_state import STATE, Start, find_start, journaled_state
from services.trainer.data.recording import RecordedStep, read_step, recorded_steps, software
from services.trainer.launch import num_ranks, run_ranks
from services.trainer.learn.batch import host_microbatch
from services.trainer.learn.step import Learner
from services.trainer.loading import load_learner
from services.trainer.loop import PolicyTrainer, load_policy_trainer
from services.trainer.worker import worker_loop
from services.trainer.world import leave_ranks

FIGURES = ("loss", "grad_norm", "ess", "clip_fraction", "mask_fraction", "learning_rate")

_TEXT_CHARACTERS = 24
ONE_RANK = ("trainer.nproc=1", "trainer.shard_ranks=0", "trainer.context_parallel=1")
"""Recipe overrides that put the whole policy on one rank, which `token_table` needs."""


@dataclass(frozen=True)
class Options:
    """Options of `pipelinerl replay`, passed here as JSON. `rollback` sets only `checkpoint` and `last`, which is a version."""

    first: int | None = None
    last: int | None = None
    overrides: Sequence[str] = ()
    tokens: bool = False
    most: int = 4
    checkpoint: bool = False


@dataclass(frozen=True)
class Plan:
    """The steps after `version` up to `last`. `folder` has a checkpoint of `version`; None = begin with the initial model.
    Steps from `first` on are compared with `known`, the run's digests. `begin`: the first step to compute."""

    first: int
    last: int
    version: int
    folder: Path | None
    begin: RecordedStep
    known: Mapping[int, str]


def digests(run_dir: Path) -> dict[int, str]:
    """Return the digest of each version's weights in the journal. Versions that a restart undid are left out."""
    path, findings = run_dir / JOURNAL, Findings()
    counted = (event for _, event, undone in events(path, read_history(path, findings), findings) if undone is None)
    return {event["version"]: event["sha256"] for event in counted if event["event"] == "weights"}


def nearest_start(run_dir: Path, first: int) -> tuple[int, Path | None]:
    """Return the newest version before step `first` that a checkpoint holds, with its folder; 0 and None if there is none."""
    earlier = ((version, path.parent) for version, path in resumable(run_dir).items() if version < first)
    return max(earlier, default=(0, None))


def plan_of(args: Options, run_dir: Path) -> Plan:
    """Return the plan for the user's range or, with `args.checkpoint`, for version `args.last`. Steps that a restart undid for
    good are left out. Raises `FieldError` if the range is reversed or not recorded, and `ServiceError` if the first step to
    compute cannot be read."""
    known = digests(run_dir)
    recorded = [step for step in recorded_steps(run_dir) if step in known or not known]
    if not recorded:
        raise FieldError("RUN", "", "has no recorded steps: run the recipe with `record: true`")
    first = recorded[0] if args.first is None else args.first
    last = recorded[-1] if args.last is None else args.last
    if args.checkpoint:
        first, recorded = nearest_start(run_dir, last)[0] + 1, [0, *recorded]
    for option, step in (("--to", last), ("--from", first)):
        if step not in recorded:
            there = f"the run recorded {'versions' if args.checkpoint else 'steps'} {recorded[0]} to {recorded[-1]}"
            gaps = sorted({*range(recorded[0], recorded[-1])} - {*recorded})[:5]
            there += f", without {', '.join(map(str, gaps))}" if gaps else ""
            raise FieldError("--step" if args.first == args.last else option, step, there)
    if first > last > 0:
        raise FieldError("--to", last, f"must not be below --from {first}")
    version, folder = nearest_start(run_dir, first)
    return Plan(first, last, version, folder, read_step(run_dir, version + 1), known)


def recipe_of(step: RecordedStep, overrides: Sequence[str]) -> Recipe:
    return recipe_from_data(dict(step.about["recipe"]), f"the recipe of step {step.step}", overrides)


def replay(settings: TrainerSettings, ranks: RankSettings, args: Options, plan: Plan) -> int:
    """Rank 0: take the steps, and print a line for each from `plan.first` on. Return 1 if a digest differs and nothing was
    overridden. `args.checkpoint`: write a checkpoint of the last version if all digests are known and equal, else return 1.
    `args.tokens`: print the token table of the last step instead of taking it."""
    run_dir, step = settings.run_dir, plan.begin
    if args.checkpoint:
        find_start(run_dir, settings.run, load_recipe(settings.recipe))  # raises an error if the run cannot be resumed
    policy = load_policy_trainer(recipe_of(step, args.overrides), settings, ranks, Start(folder=plan.folder))
    _check_start(policy, plan.version, plan.known)
    records = {record["step"]: record for record in read_jsonl(run_dir / "metrics.jsonl")}
    compared, different, notes = 0, list[int](), list[str]()
    try:
        for number in range(plan.version + 1, plan.last + 1):
            step = step if number == step.step else read_step(run_dir, number)
            if (found := differences(step.about, software(recipe_of(step, ()), policy.num_ranks))) != notes:
                notes = found
                print(*notes, sep="\n")
            policy.learner.use(recipe_of(step, args.overrides).trainer)
            if args.tokens and number == plan.last:
                print(*token_table(policy, step, args.most), sep="\n")
                return 0
            figures = policy.step(policy.learner.prepare(step.groups, number - 1))
            if number >= plan.first:
                sha256, expected = policy.snapshot(PolicyVersion(1, number)).sha256().hex(), plan.known.get(number, "")
                compared += bool(expected)
                different += [number] if expected and sha256 != expected else []
                print(line(number, sha256, expected, figures, records.get(number, {}), bool(args.overrides)), flush=True)
        if args.checkpoint and compared == plan.last - plan.version and not different:
            state = journaled_state(run_dir, settings.run, plan.last, recipe_of(step, ()))
            write_checkpoint(run_dir, sys.maxsize, policy.begin_checkpoint(plan.last), state)
            return 0
    finally:
        policy.end()
    print(verdict(compared, different, bool(args.overrides)))
    return int(args.checkpoint or (bool(different) and not args.overrides))


def token_table(policy: PolicyTrainer, step: RecordedStep, most: int) -> Iterator[str]:
    """Yield lines for the `most` branches with the largest |log π − log μ| of a token, the largest first. π is the policy
    before the step. A single rank must hold the whole policy."""
    rows = []
    for group in step.groups:
        for sequence, advantage in zip(group.sequences, group.advantages.tolist(), strict=True):
            for branch in sequence.all_branches:
                values = token_values(policy.learner, branch, advantage, step.step - 1)
                rows.append((float(np.abs(values[0]).max(initial=0.0)), sequence, branch, advantage, values))
    rows.sort(key=lambda row: -row[0])
    yield f"step {step.step}: {len(rows)} branches; the {min(most, len(rows))} with the largest |log π − log μ| of a token"
    for _, sequence, branch, advantage, (log_weights, clipped, masked, entropy) in rows[:most]:
        yield ""
        yield f"{sequence.sequence_id}  reward {sequence.reward:g}  advantage {advantage:+.4g}  actor {sequence.actor or '-'}"
        yield f"  {'index':>5} {'π/μ':>9} {'log μ':>9} {'lag':>4} {'entropy':>8}  {'':13} token"
        places = ((span, place) for span in branch.spans for place in range(span.start, span.end))
        for at, (span, place) in enumerate(places):
            text = policy.tokenizer.decode([int(branch.completion_token_ids[place])])
            marks = " ".join(name for name, is_so in (("clipped", clipped[at]), ("masked", masked[at])) if is_so)
            figures = f"{math.exp(log_weights[at]):9.4f} {branch.behaviour_logprobs[at]:9.4f} {step.step - 1 - span.version:4}"
            shown = printable(repr(str(text))[1:-1])[:_TEXT_CHARACTERS]
            yield f"  {place:>5} {figures} {entropy[at]:8.4f}  {marks:13} {shown}"


def token_values(learner: Learner, branch: Branch, advantage: float, version: int) -> NDArray[np.float32]:
    """Return float32[4, C] for the branch's C sampled tokens: log π − log μ, clipped (0 or 1), masked (0 or 1), entropy."""
    host = host_microbatch([branch], np.array([advantage]), np.ones(1), version, has_gradient=False)
    values, _ = learner.microbatch(host.on(learner.policy.device))
    return np.asarray(values[:4].cpu())


def line(step: int, sha256: str, expected: str, now: Mapping[str, Any], then: Mapping[str, Any], is_experiment: bool) -> str:
    """Return the line of a replayed step. Figures are shown as `recorded → replayed` if they differ. Pure."""
    if is_experiment:
        state = "other weights" if sha256 != expected else "the same weights"
    else:
        differs = f"DIFFERS from {expected[:12]}{largest_difference(then, now)}"
        state = "not journaled" if not expected else "equal" if sha256 == expected else differs
    shown = " ".join(f"{name} {_pair(then.get(name), now[name])}" for name in FIGURES if now.get(name) is not None)
    return f"step {step:>5}  {sha256[:12]} {state}  {shown}"


def largest_difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a text with the figure whose relative difference is largest; "" if none can be compared. Pure."""
    pairs = ((name, then.get(name), now.get(name)) for name in FIGURES)
    shares = [(abs(b - a) / (abs(a) or 1.0), name) for name, a, b in pairs if a is not None and b is not None]
    return ", in {1} by {0:.1e}".format(*max(shares)) if shares else ""


def _pair(then: float | None, now: float) -> str:
    return f"{now:.6g}" if then is None or f"{then:.6g}" == f"{now:.6g}" else f"{then:.6g} → {now:.6g}"


def verdict(compared: int, different: Sequence[int], is_experiment: bool) -> str:
    if is_experiment:
        return "an experiment: the recorded data with other settings; figures are shown as recorded → replayed"
    if not compared:
        return "the journal has no digests of these versions, so nothing was compared"
    if not different:
        return f"all {compared} versions have the digests of the run"
    return (
        f"{len(different)} of {compared} versions differ from the run, from version {different[0]} on. Equal digests need "
        "the same machine, software, number of ranks and threads (docs/replay.md)"
    )


def _check_start(policy: PolicyTrainer, version: int, known: Mapping[int, str]) -> None:
    """Raise `ServiceError` if the weights to start from are not those of the run, for example after a change of the model."""
    expected = known.get(version, "")
    if expected and policy.snapshot(PolicyVersion(1, version)).sha256().hex() != expected:
        raise ServiceError(
            f"the weights of version {version}, from which the replay begins, are not those of the run: restore the run's "
            "initial model if it has changed, and use a device of the same kind, since others may round differently"
        )


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a note for each value of `software`, except the recipe, that differs from that in the run (`then`). Pure."""
    changed = {name: value for name, value in now.items() if name != "recipe" and then.get(name) != value}
    here = "here, so the digests may differ"
    return [f"note: {name} was {then.get(name)!r} in the run, and is {value!r} {here}" for name, value in changed.items()]


def main() -> int:
    args, ranks, codes = Options(**json.loads(sys.argv[1])), RankSettings(), list[int | None]()
    args = replace(args, overrides=[*args.overrides, *(ONE_RANK if args.tokens else ())])
    logging.getLogger().setLevel(logging.ERROR)

    def work() -> None:
        settings = read_settings(TrainerSettings)
        plan = plan_of(args, settings.run_dir)
        recipe = recipe_of(plan.begin, args.overrides)
        torch.set_num_threads(plan.begin.about["threads"])  # the number of threads decides in which order sums are rounded
        if ranks.world_size == 1 and (several := num_ranks(settings, recipe)) > 1:
            codes.append(run_ranks(settings, several, (sys.executable, "-m", "services.trainer.replay", *sys.argv[1:])))
        elif ranks.rank == 0:
            codes.append(replay(settings, ranks, args, plan))
        else:
            state = plan.folder / STATE if plan.folder else None
            worker_loop(load_learner(recipe, model_source(recipe, settings), ranks, state, settings.revision))
            leave_ranks()

    return exit_code(work) or next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main())
