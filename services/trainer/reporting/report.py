"""One line of samples.jsonl: a completion as a person reads it, with what is known of each of its tokens.

Pure but for the tokenizer behind `TokenPieces`. Which completions become samples is not decided here.

One place where a run's figures come together: files, the gRPC feed, Prometheus, and the summary at the end.

Called by the optimizer loop and the updater on the event loop; does no waiting of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelinerl.messages.sequences import Sequence
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.advantages import all_equal
from pipelinerl.run_summary import RunSummary, RunTotals
from services.trainer.data.actor_client import ActorLoad
from services.trainer.data.evaluation import HeldoutResult, HeldoutSample
from services.trainer.learn.batch import TrainingGroup
from services.trainer.learn.metrics import SAMPLED_WEIGHTS, sampled_sequences
from services.trainer.probe import Parity
from services.trainer.records import RunFiles, StepRecord
from services.trainer.reporting.metrics import TrainerMetrics
from services.trainer.reporting.token_pieces import TokenPieces
from services.trainer.weight_sync.session import UpdateRecord

Sample = dict[str, Any]
"""One object of samples.jsonl. Keys: docs/run-directory.md."""
MOST_TOKENS = 1024
"""Of a completion that are written one by one."""


def trained_sample(
    step: int, sequence: Sequence, pieces: TokenPieces | None, weights: NDArray[np.float64] | None
) -> Sample:
    """Of a sequence that optimizer step `step` trained on; `weights` float64[tokens]: its importance weights."""
    return {
        "step": step,
        "version": step - 1,
        "prompt": sequence.prompt_text,
        "completion": sequence.completion_text,
        "reward": sequence.reward,
        "spans": [[span.version, span.start, span.end] for span in sequence.spans],
        "heldout": False,
        "tokens": pieces and pieces.of(sequence.completion_token_ids, sequence.completion_text, MOST_TOKENS),
        "weights": None if weights is None else rounded(weights[:MOST_TOKENS]),
    }


def heldout_sample(version: int, sample: HeldoutSample, pieces: TokenPieces | None) -> Sample:
    """Of the evaluation of `version`."""
    return {
        "step": version,
        "version": version,
        "prompt": sample.prompt,
        "completion": sample.completion,
        "reward": sample.reward,
        "spans": [list(span) for span in sample.spans],
        "heldout": True,
        "tokens": pieces and pieces.of(sample.token_ids, sample.completion, MOST_TOKENS),
        "weights": None,
    }


def rounded(weights: Iterable[float]) -> list[float]:
    """To four digits: enough to read, and a third of the text."""
    return [float(f"{weight:.4g}") for weight in weights]


MOST_WITH_TOKENS = 500
"""Steps of a run whose samples are written token by token: a sample so has up to 20 KB, and without them 1 to 4."""


@dataclass
class _Latest:
    """What arrived since the last record and goes into the next one."""

    heldout: HeldoutResult | None = None
    mismatch: float | None = None
    parity_failures: int = 0
    update: UpdateRecord | None = None
    joins: list[dict[str, Any]] = field(default_factory=list)


class RunReport:
    """See the module."""

    def __init__(
        self,
        recipe: Recipe,
        files: RunFiles,
        metrics: TrainerMetrics,
        pieces: TokenPieces | None = None,
        on_sample: Callable[[Sample], None] = lambda sample: None,
    ) -> None:
        """`pieces`: of the run's tokenizer; None leaves samples without tokens. `on_sample` is told each as it is written."""
        self._recipe, self._files, self._metrics = recipe, files, metrics
        self._pieces, self._on_sample = pieces, on_sample
        self._started_at = time.monotonic()
        self._last_step_at = self._started_at
        self._latest = _Latest()
        self._loads: dict[str, ActorLoad] = {}
        self.totals = RunTotals()

    def to_state(self) -> dict[str, Any]:
        """JSON-able; for a checkpoint."""
        return {"time_s": time.monotonic() - self._started_at, "totals": self.totals.to_state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `to_state` of the report of an earlier trainer of this run; the time between does not count."""
        self._last_step_at = time.monotonic()
        self._started_at = self._last_step_at - state["time_s"]
        self.totals = RunTotals.from_state(state["totals"])

    @property
    def loads(self) -> Mapping[str, ActorLoad]:
        """The newest answer of each actor."""
        return self._loads

    def actor_loads(self, loads: Mapping[str, ActorLoad]) -> None:
        """The newest answers of the actors, by name; one that left keeps its last."""
        self._loads.update(loads)

    def heldout(self, result: HeldoutResult) -> None:
        self._latest.heldout = result
        self.totals.heldout.append((result.version, result.accuracy, result.num_unanswered))
        for sample in result.samples:
            self._write_sample(heldout_sample(result.version, sample, self._pieces))

    def parity(self, parity: Parity) -> None:
        self._latest.parity_failures += parity.failures
        self.totals.parity_failures += parity.failures
        if parity.mismatch is not None:
            self._latest.mismatch = max(self._latest.mismatch or 0.0, parity.mismatch)
            self.totals.logprob_mismatch.append(parity.mismatch)

    def update_served(self, update: UpdateRecord) -> None:
        self._latest.update = update
        self.totals.add_update(update.num_bytes, update.transfer_s, update.stall_s.values())
        self._metrics.membership.served(update)

    def joined(self, actor: str, update: UpdateRecord) -> None:
        """A side group has brought `actor` to the served version; `round_trip_s` is what that took."""
        self._latest.joins.append({"actor": actor, "version": update.version, "join_s": update.round_trip_s})
        self.totals.join_s.append(update.round_trip_s)
        self._metrics.membership.joined(update.round_trip_s)

    def step(self, figures: StepRecord, batch: list[TrainingGroup], tokens_arrived: int) -> StepRecord:
        """Completes one step's record, writes it everywhere and returns it. `figures` under SAMPLED_WEIGHTS are for samples."""
        record = self._complete(figures, batch, tokens_arrived)
        self.totals.add_step(record)
        self._latest = _Latest()
        self._files.write_step(record)
        self._metrics.observe(record)
        weights = figures.get(SAMPLED_WEIGHTS, {})
        for sequence in sampled_sequences(batch):
            known = weights.get(sequence.sequence_id)
            self._write_sample(trained_sample(record["step"], sequence, self._pieces, known))
        return record

    def _complete(self, figures: StepRecord, batch: list[TrainingGroup], tokens_arrived: int) -> StepRecord:
        now = time.monotonic()
        since_last_s, self._last_step_at = now - self._last_step_at, now
        sequences = [sequence for group in batch for sequence in group.sequences]
        rewards = np.array([sequence.reward for sequence in sequences])
        latest = self._latest
        return {
            **{key: value for key, value in figures.items() if key != SAMPLED_WEIGHTS},
            "time_s": now - self._started_at,
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            **group_figures(batch),
            "heldout_accuracy": latest.heldout.accuracy if latest.heldout else None,
            "heldout_version": latest.heldout.version if latest.heldout else None,
            "heldout_unanswered": latest.heldout.num_unanswered if latest.heldout else None,
            "tokens_generated": tokens_arrived,
            "tokens_generated_per_s": (tokens_arrived - self.totals.tokens_generated) / since_last_s,
            "tokens_trained_per_s": figures["tokens_trained"] / since_last_s,
            "completion_tokens_mean": float(np.mean([s.num_completion_tokens for s in sequences])),
            "multi_version_fraction": float(np.mean([s.num_versions > 1 for s in sequences])),
            "weight_update": update_figures(latest.update) if latest.update else None,
            "stall_s": max(latest.update.stall_s.values(), default=None) if latest.update else None,
            "joins": latest.joins,
            "logprob_mismatch": latest.mismatch,
            "parity_failures": latest.parity_failures,
            "actor_busy_fraction": self.actor_busy_fraction(),
            "trainer_busy_fraction": (self.totals.compute_s + figures["step_s"]["compute"]) / (now - self._started_at),
        }

    def _write_sample(self, sample: Sample) -> None:
        """The page shows the newest with its tokens; the file, which only grows, has those of some steps."""
        due = has_tokens(sample["step"], self._recipe.trainer.steps)
        self._files.write_sample(sample if due else {**sample, "tokens": None, "weights": None})
        self._on_sample(sample)

    def actor_busy_fraction(self) -> float | None:
        """Share of the actors' time, since their engines were up, in which they generated."""
        uptime_s = sum(load.uptime_s for load in self._loads.values())
        return sum(load.busy_s for load in self._loads.values()) / uptime_s if uptime_s else None

    def write_summary(
        self,
        sequences: Mapping[str, int],
        reasons: Mapping[str, Mapping[str, int]],
        version: int,
        *,
        interrupted: bool,
        evictions: int = 0,
    ) -> RunSummary:
        """summary.json from everything so far. `reasons`: sequences by outcome and reason, from the ledger."""
        wall_s = time.monotonic() - self._started_at
        summary = self.totals.summary(
            self._recipe,
            version,
            sequences,
            reasons=reasons,
            interrupted=interrupted,
            wall_s=wall_s,
            evictions=evictions,
            actor_busy_fraction=self.actor_busy_fraction(),
            trainer_busy_fraction=self.totals.compute_s / wall_s,
        )
        self._files.write_summary(summary)
        return summary


def has_tokens(step: int, steps: int) -> bool:
    """Whether the samples of `step` of a run of `steps` are written with tokens and weights: about `MOST_WITH_TOKENS` steps,
    the first and the last among them. Pure."""
    return step <= 1 or step == steps or step % -(-steps // MOST_WITH_TOKENS) == 0


def group_figures(batch: list[TrainingGroup]) -> dict[str, float]:
    """How much rewards differ inside the groups of a step, under the names of metrics.jsonl. Pure."""
    groups = [np.array([sequence.reward for sequence in group.sequences]) for group in batch]
    return {
        "group_reward_std": float(np.mean([rewards.std() for rewards in groups])),
        "equal_reward_groups": float(np.mean([all_equal(rewards) for rewards in groups])),
    }


def update_figures(update: UpdateRecord) -> dict[str, Any]:
    """One update for metrics.jsonl: the slowest actor's seconds."""
    return {
        "version": update.version,
        "bytes": update.num_bytes,
        "transfer_s": update.transfer_s,
        "round_trip_s": update.round_trip_s,
        "receive_s": max(update.receive_s.values(), default=None),
        "prepare_s": max(update.prepare_s.values(), default=None),
        "stall_s": max(update.stall_s.values(), default=None),
        "members": len(update.stall_s),
    }
