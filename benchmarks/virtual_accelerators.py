"""The paper's worked case with real services on virtual accelerators: pipeline mode against conventional mode.

    python -m benchmarks.virtual_accelerators [--cases pipeline ...] [--flash-ms F]

**All times are modelled; what happens in them is real**: services, NATS, weight transfers, sampling and learning of a tiny
policy. Each decode step, optimizer step and weight transfer takes at least as long as a stated profile says
(`virtual_profile.py`), and steps for which this machine was too slow are counted. N accelerators are all generators and
trainers in turn (conventional mode), or split (pipeline). U(h), τ and lengths, uniform on 1..L, are those of the paper's
appendix A; there are no groups, and the baseline is the learned one of its equation 4.

Each run is compared with the simulator's prediction from the same profile, and with the closed form. Both sides save their
policy every 8 steps; each saved policy is judged afterwards. Results: JSON, and a plot of throughput over lag and of reward
over modelled time. About ten minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bounded_run import run_steps
from benchmarks.crossing import crossing_time
from benchmarks.result_files import kept_rows, write_result
from benchmarks.virtual_profile import DIGITS, PAPER_CURVE, PAPER_TRAINING_TIME, Profile, score
from pipelinerl.local.services import available_cores
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.rl.simulator import Simulation, simulate
from pipelinerl.rl.throughput import conventional_rate, split
from pipelinerl.run_dir import read_json
from pipelinerl.run_summary import lag_summary
from services.verifier.rewards.item import RewardInput

RESULTS = Path(__file__).parent / "results"
NAME = "virtual_accelerators"
ACCELERATORS = 32
"""N: a quarter of the paper's 128."""
BATCH, LONGEST = 64, 128
"""B = 2 N, where the worked case has N: half of its largest lag, and twice the time of a step. L, tokens."""
PROFILE = Profile(
    decode=PAPER_CURVE.points,
    training=PAPER_TRAINING_TIME,
    transfer=80.0,
    lengths=tuple((tokens, 1.0) for tokens in range(1, LONGEST + 1)),
    flash_s=0.55e-3,
)
"""120 sequences/s in pipeline mode. A transfer takes a twelfth of its step: 15 GB at 3 Tbit/s, where that is half a second."""
SAVE_EVERY, REWARD = 8, 0.6
"""Optimizer steps; and the reward of which the time is compared. An untrained policy gets 0.21."""
WITHIN_S = 300.0
"""Of one run."""


@dataclass(frozen=True)
class Case:
    """`g` = 0: pipeline, with I = `generators` of the accelerators and H = `in_progress`. The first `warmup` steps are not
    counted."""

    g: int
    warmup: int
    steps: int
    generators: int = 11
    in_progress: int = 192

    @property
    def num_actors(self) -> int:
        return ACCELERATORS if self.g else self.generators

    @property
    def num_ranks(self) -> int:
        return ACCELERATORS if self.g else ACCELERATORS - self.generators

    @property
    def slots(self) -> int:
        """Sequences in progress on each accelerator that generates, at most."""
        return math.ceil(BATCH * self.g / ACCELERATORS) if self.g else self.in_progress


CASES = {
    "pipeline": Case(0, 136, 144),
    "conventional, same mean lag": Case(48, 0, 144),
    "conventional, same largest lag": Case(69, 0, 138),
    "conventional, no lag": Case(1, 0, 3),
}
"""The simulator predicts a mean lag of 23.5 and a largest one of 68 for the pipeline."""
CONVENTIONAL_G = (4, 8, 16, 32, 48, 69, 96, 128)
PIPELINE_H = (16, 32, 64, 96, 128, 192, 256)
"""Of the simulator's lines in the plot."""


def recipe_of(case: Case, model: Path, problems: Path) -> Recipe:
    """One actor process and one trainer process stand for all accelerators."""
    return Recipe.model_validate(
        {
            "name": "virtual",
            "mode": "conventional" if case.g else "pipeline",
            "model": {"source": "path", "name": str(model), "max_context": LONGEST + 1},
            "task": {"source": "jsonl", "name": "even-digits", "path": str(problems), "heldout_problems": 1},
            "reward": {"scorer": "benchmarks.virtual_profile:score"},
            "sampling": {"group_size": 1, "max_tokens": LONGEST},
            "actor": {"sequences_in_progress": case.num_actors * case.slots, "publish_buffer": 8192},
            "algorithm": {"advantage": "value", "max_lag": None, "conventional_g": max(1, case.g)},
            "trainer": {
                # Conventional mode ends with a phase. A pipeline is interrupted: at its end nothing new would be issued.
                "steps": case.steps if case.g else 10 * (case.warmup + case.steps),
                "batch_size": BATCH,
                "learning_rate": 3e-4,
                "warmup_steps": 5,
                "beta2": 0.95,
                "threads": 1,
            },
            "weights": {"probe_every": 0},
            "evaluation": {"every_steps": 0},
            "checkpoint": {"every_steps": SAVE_EVERY, "keep": 1000},
        }
    )


def write_inputs(folder: Path) -> tuple[Path, Path]:
    """The policy, with random weights, and the problems."""
    from benchmarks.random_models import build_tiny
    from benchmarks.small_models.supervised import Lessons

    shape = Lessons(LONGEST + 1, hidden_size=32, num_layers=1, num_heads=1, intermediate_size=64)
    model, problems = folder / "model", folder / "problems.jsonl"
    build_tiny(load_recipe("arithmetic", [f"model.max_context={LONGEST + 1}"]), model, shape)
    lines = (json.dumps({"prompt": digit, "answer": digit}) for digit in DIGITS)
    problems.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return model, problems


# --- what is expected


def predicted(case: Case, profile: Profile) -> Simulation:
    """By the simulator, each accelerator an actor and a rank of its own."""
    recipe = recipe_of(case, Path("model"), Path("problems.jsonl"))
    alone = recipe.model_copy(
        update={
            "actor": recipe.actor.model_copy(update={"sequences_in_progress": case.slots}),
            "trainer": recipe.trainer.model_copy(update={"steps": 10_000_000}),
        }
    )
    warmup, steps = (0, max(2 * case.g, 16)) if case.g else (case.warmup, case.steps)
    return simulate(
        alone, profile.timing, profile.completions,
        num_actors=case.num_actors, num_ranks=case.num_ranks, warmup_steps=warmup, steps=steps,
    )  # fmt: skip


def closed_form(case: Case, profile: Profile) -> float:
    """Tokens per flash."""
    curve, training, lengths = profile.curve, profile.training, profile.completions
    if case.g:
        return conventional_rate(curve, training, lengths, BATCH * case.g, ACCELERATORS)
    return split(curve, training, lengths, BATCH, case.in_progress, case.num_actors, case.num_ranks).rate


def expected(case: Case, profile: Profile) -> dict[str, Any]:
    simulated = predicted(case, profile)
    lag = lag_summary(simulated.lag_histogram)
    return {
        "simulated_tokens_per_flash": simulated.rate,
        "simulated_lag_mean": lag["mean"],
        "simulated_lag_max": lag["max"],
        "simulated_trainer_idle": simulated.trainer_idle,
        "closed_form_tokens_per_flash": closed_form(case, profile),
    }


def best_split(in_progress: int, profile: Profile) -> Case:
    """The pipeline with that H and the I that is fastest in closed form."""
    cases = [Case(0, 136, 68, generators, in_progress) for generators in range(1, ACCELERATORS)]
    return max(cases, key=lambda case: closed_form(case, profile))


# --- what is measured


def run(case: Case, profile: Profile, folder: Path) -> dict[str, Any]:
    """One run, and what was measured in it. Raises `ServiceError`."""
    recipe = recipe_of(case, *write_inputs(folder))
    paces = {"actor": folder / "decoding.json", "trainer": folder / "training.json"}
    accelerators = {"actor": case.num_actors, "trainer": case.num_ranks}
    commands = {
        kind: (*(sys.executable, "-m", f"benchmarks.virtual_{kind}"), *(profile.of(accelerators[kind]).to_json(), str(file)))
        for kind, file in paces.items()
    }
    load_before = round(os.getloadavg()[0], 2)
    run_dir, records = run_steps(recipe, folder, commands, case.warmup + case.steps, WITHIN_S)
    pace = {kind: read_json(file) for kind, file in paces.items()}
    saved = {int(path.name.removeprefix("step-")): path for path in run_dir.checkpoints.glob("step-*")}
    policies = {0: folder / "model", **saved}
    return measured(records, case, profile.flash_s) | {
        "decode_steps_overran": pace["actor"]["overran_share"],
        "optimizer_steps_overran": pace["trainer"]["overran_share"],
        "load_before": load_before,
        "pace": pace,
        "curve": curve(records, {version: judged(policies[version]) for version in sorted(policies)}, profile.flash_s),
    }


def served_at_s(records: Sequence[Mapping[str, Any]]) -> float:
    """The records' clock when the first version was served: the first step waits for sequences from then on."""
    return float(records[0]["time_s"] - records[0]["step_s"]["total"])


def measured(records: Sequence[Mapping[str, Any]], case: Case, flash_s: float) -> dict[str, Any]:
    """Of the steps after the warm-up; in conventional mode these are whole phases. Pure."""
    counted = records[case.warmup :]
    began_s = records[case.warmup - 1]["time_s"] if case.warmup else served_at_s(records)
    flashes = (counted[-1]["time_s"] - began_s) / flash_s
    tokens = sum(record["tokens_trained"] for record in counted)
    lags: Counter[int] = Counter()
    for record in counted:
        lags.update({int(lag): number for lag, number in record["lag_histogram"].items()})
    return {
        "steps": len(counted),
        "tokens_per_flash": tokens / flashes,
        "step_flashes": flashes / len(counted),
        "completion_tokens": tokens / sum(record["sequences_trained"] for record in counted),
        "lag_mean": lag_summary(lags)["mean"],
        "lag_max": lag_summary(lags)["max"],
        "trainer_waits": sum(record["step_s"]["wait"] for record in counted) / (flashes * flash_s),
        "ess_mean": statistics.fmean(record["ess"] for record in counted),
        "reward_mean": statistics.fmean(record["reward_mean"] for record in counted[-5:]),
    }


def judged(folder: Path, samples: int = 32, tokens: int = 64) -> float:
    """Mean reward of a policy over `samples` completions of `tokens` tokens for each problem."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from benchmarks.virtual_actor import RowCache

    disable_progress_bar()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    prompts = [digit for digit in DIGITS for _ in range(samples)]
    cache, generator = RowCache(len(prompts), tokens), torch.Generator().manual_seed(0)
    last = torch.tensor(tokenizer(prompts)["input_ids"])
    sampled = []
    with torch.no_grad():
        for _ in range(tokens):
            last = cache.next_probabilities(model, last).multinomial(1, generator=generator)
            sampled.append(last)
    completions = tokenizer.batch_decode(torch.cat(sampled, dim=1))
    return statistics.fmean(score(RewardInput(*pair, None, {})) for pair in zip(prompts, completions, strict=True))


def curve(records: Sequence[Mapping[str, Any]], rewards: Mapping[int, float], flash_s: float) -> list[dict[str, float]]:
    """Reward of saved policies, and the flashes since the first version was served. Pure."""
    began_s = served_at_s(records)
    flashes = {0: 0.0, **{record["policy_version"]: (record["time_s"] - began_s) / flash_s for record in records}}
    return [
        {"version": version, "flashes": flashes[version], "reward": rewards[version]}
        for version in rewards
        if version in flashes
    ]


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With ratios to the pipeline: above 1, the pipeline is faster. Pure."""
    for row in rows:
        times, rewards = (np.array([point[key] for point in row["curve"]]) for key in ("flashes", "reward"))
        reached = crossing_time(times, rewards, REWARD)
        row["flashes_to_reward"] = reached if math.isfinite(reached) else None
    pipeline = next((row for row in rows if row["case"] == "pipeline"), None)
    for row in rows:
        row["measured_by_simulated"] = row["tokens_per_flash"] / row["simulated_tokens_per_flash"]
        if pipeline is None:
            continue
        for kind in ("", "simulated_", "closed_form_"):
            key = f"{kind}tokens_per_flash"
            row[f"{kind}speed_of_pipeline"] = pipeline[key] / row[key]
        there = pipeline["flashes_to_reward"] and row["flashes_to_reward"]
        row["time_to_reward_by_pipeline"] = row["flashes_to_reward"] / pipeline["flashes_to_reward"] if there else None
    return list(rows)


def plot(rows: Sequence[Mapping[str, Any]], lines: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = dict(zip(CASES, ("#d1495b", "#08519c", "#6baed6", "0.5"), strict=True))
    figure, (frontier, learning) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for kind, colour in (("pipeline", "#d1495b"), ("conventional", "#3182bd")):
        for key, style in (("simulated_lag_mean", "-"), ("simulated_lag_max", ":")):
            name = "mean" if style == "-" else "largest"
            frontier.plot(
                [point[key] for point in lines[kind]],
                [point["simulated_tokens_per_flash"] for point in lines[kind]],
                style, color=colour, label=f"{kind}, simulated, {name} lag",
            )  # fmt: skip
    for row in rows:
        colour = colours[row["case"]]
        for key in ("lag_mean", "lag_max"):
            frontier.plot(row[key], row["tokens_per_flash"], "o" if key == "lag_mean" else "^", color=colour)
        learning.plot(
            [point["flashes"] / 1000 for point in row["curve"]],
            [point["reward"] for point in row["curve"]],
            marker="o", markersize=3, drawstyle="steps-post", color=colour, label=row["case"],
        )  # fmt: skip
    learning.axhline(REWARD, color="0.7", linewidth=0.8, linestyle="--")
    frontier.set_xlabel("token lag, optimizer steps; symbols: runs (● mean, ▲ largest)")
    frontier.set_ylabel("trained tokens per flash")
    learning.set_xlabel("modelled time, thousand flashes")
    learning.set_ylabel("reward of saved policies")
    for axis in (frontier, learning):
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    figure.suptitle(f"{ACCELERATORS} virtual accelerators, batch {BATCH}: all times are modelled", fontsize=10)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), help="others keep their results")
    parser.add_argument("--flash-ms", type=float, default=PROFILE.flash_s * 1e3, help="milliseconds that a flash lasts here")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    profile, file = replace(PROFILE, flash_s=arguments.flash_ms / 1e3), arguments.output / f"{NAME}.json"
    rows = {row["case"]: row for row in kept_rows(file, "case", arguments.cases)}
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(arguments.cases):
            case = CASES[name]
            figures = run(case, profile, Path(folder) / str(number))
            rows[name] = {"case": name, "g": case.g or None, **expected(case, profile), **figures}
            print({key: value for key, value in rows[name].items() if key != "curve"}, file=sys.stderr, flush=True)
    lines = {
        "conventional": [expected(Case(g, 0, g), profile) for g in CONVENTIONAL_G],
        "pipeline": [expected(best_split(in_progress, profile), profile) for in_progress in PIPELINE_H],
    }
    ordered = compared([rows[name] for name in CASES if name in rows])
    result = {"benchmark": NAME, "times": "modelled", "flash_s": profile.flash_s, "machine": {"cores": available_cores()}}
    write_result(file, {**result, "rows": ordered, "lines": lines})
    plot(ordered, lines, arguments.output / f"{NAME}.svg")


if __name__ == "__main__":
    main()
