"""The table of the figures of an optimizer step, each declared once. Pure.

The summary's figures, the trainer's gauges and counters, the data of the run's pages, and the tables of docs/run-directory.md
follow from it. The learner, the optimizer loop and the recorder compute the figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal

from pipelinerl.rl.groups import LAG_BUCKETS

Reduction = Literal["sum", "ones", "last", "smallest", "largest", "mean", "rate"]
"""Rule by which the values of all steps give the run's figure: `ones` counts the steps in which the value is 1 or true, `mean`
is weighted by `Figure.weight`, and `rate` is the sum of the values divided by the sum of the weights."""


@dataclass(frozen=True)
class Figure:
    """A figure of an optimizer step. `key`: in metrics.jsonl. `text`: Markdown."""

    key: str
    text: str
    metric: str = ""
    """Name of the metric with exactly this value, a counter if the name ends with `_total`; empty if there is none."""
    unit: str = ""
    """Unit of the metric if its name does not end with it."""
    help: str = ""
    """Text of the metric; empty = `text`."""
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Label of the metric and its values, if the figure is a mapping with these keys."""
    stays: bool = False
    """True if the metric keeps its value at a step without the figure. If False, it has no series after such a step."""
    on_page: bool = False
    event: type | None = None
    """Type whose empty value means that no event happened, if the figure describes events since the previous step; or None."""
    summary: Mapping[str, Reduction] = field(default_factory=dict)
    """Keys in summary.json; `ess.mean` is the key `mean` of the object `ess`."""
    weight: str = ""
    """Key, in the record, of the weight for `mean` and `rate`; `a.b` is the key `b` of the object `a`. Empty = weight 1."""
    trained: bool = False
    """True if the summary ignores skipped steps."""


_LAG, _COMPUTE = {"lag": LAG_BUCKETS}, "step_s.compute"

FIGURES = (
    Figure("step", "Optimizer steps taken, from 1.", on_page=True),
    Figure("policy_version", "Version that this step made: the same number."),
    Figure("served_version", "Newest version that every member serves when the line is written."),
    Figure("time_s", "Seconds since the trainer was ready.", on_page=True),
    Figure("loss", "Loss of the whole batch, normalised as the recipe says.", "loss", "none"),
    Figure("skipped", "Reason why the step changed no weight: `loss not finite`, `gradient not finite`; else empty.",
           "steps_skipped_total", "steps", help="Optimizer steps that changed no weight."),
    Figure("grad_norm", "L2 norm of the policy's gradient, without a value head, before clipping.", "gradient_norm", "none",
           on_page=True),
    Figure("clipped", "True if the gradient was clipped to [the bound of its norm](learning.md#the-optimizer).",
           "steps_clipped_total", "steps", help="Optimizer steps whose gradient was clipped to the bound of its norm.",
           on_page=True, summary={"steps_clipped": "ones"}, trained=True),
    Figure("learning_rate", "Learning rate of the step.", "learning_rate", "none"),
    Figure("entropy", "Mean entropy of the policy at the sampled positions, nats.", "entropy_nats", on_page=True),
    Figure("ess", "Effective sample size of the step's tokens divided by their number, from unclamped importance weights.",
           "ess_ratio", on_page=True, summary={"ess.mean": "mean", "ess.min": "smallest"}, trained=True),
    Figure("ess_by_lag", "Effective sample size divided by the number of tokens, for the tokens of each lag in the step, by "
           "bucket: `0`, `1`, `2`, `3-4`, `5-8`, `9-16`, `17+`.", "ess_by_lag_ratio", labels=_LAG),
    Figure("clip_fraction", "Share of the tokens at which the loss's bound was active.", "clip_ratio"),
    Figure("clip_fraction_by_lag", "Share of the tokens of each lag in the step at which the loss's bound was active, by the "
           "same buckets.", "clip_by_lag_ratio", labels=_LAG),
    Figure("clip_range_cut", "Mean share of the tokens that `ppo_clip`, `grpo` or `gspo` clipped in the last ten steps; null "
           "unless it exceeds a quarter."),
    Figure("value_loss", "Loss of the learned baseline, weighted over tokens like the policy loss, without the factor "
           "`algorithm.value_coefficient`; null unless `algorithm.advantage` is `value`.", "value_loss", "none"),
    Figure("explained_variance", "1 − Var(R − v) / Var(R) over tokens, for the returns R and a learned baseline v; null "
           "without a learned baseline, or if all returns are equal.", "explained_variance_ratio", stays=True),
    Figure("mask_fraction", "Share of the tokens that `algorithm.mask` left out of the policy loss.", "mask_ratio"),
    Figure("mismatch_kl", "KL estimate between actor and trainer, nats: mean of w − 1 − log w over tokens of lag 0; null if "
           "there are none.", "mismatch_kl_nats", stays=True, on_page=True, summary={"mismatch_kl_mean": "mean"}, trained=True),
    Figure("reference_kl", "KL estimate to the initial policy, weighted over tokens like the policy loss; only if "
           "`algorithm.kl_coefficient` is above 0.", "reference_kl_nats"),
    Figure("log_weight_abs_max", "Largest |log π − log μ| of a token, nats."),
    Figure("lag", "`mean`, `p95` and `max` of the lag over the step's tokens.", on_page=True),
    Figure("lag_histogram", "Number of trained tokens by lag; empty for a skipped step.", on_page=True),
    Figure("ended_by_length", "Numbers of sequences [trained, dropped as stale] since the previous step, by length: up to 16 "
           "sampled tokens, up to 32, and so on."),
    Figure("held_by_max_lag", "True if, when the line is written, `algorithm.max_lag` keeps the feeder from issuing more "
           "groups, and not the freshness limit or the end of the run."),
    Figure("max_lag_too_small", "True if `algorithm.max_lag` is below `largest_lag` and has a cost: the trainer waits while "
           "the limit holds the feeder, or more than 1 % of the sequences so far were dropped as stale.", on_page=True),
    Figure("largest_lag", "[Largest lag](architecture.md#staleness) predicted for full actors, from the present members and "
           "the lengths since the trainer started; G − 1 in conventional mode.", on_page=True, summary={"largest_lag": "last"}),
    Figure("advantage_abs_mean", "Mean of |advantage| over sequences; 0 if no group has a signal."),
    Figure("reward_mean", "Mean reward of the step's sequences.", "reward_mean", "reward", on_page=True),
    Figure("reward_std", "Standard deviation of the rewards of the step's sequences.", "reward_std", "reward"),
    Figure("tasks", "Object for each task with sequences in the step, by name: `sequences`, `reward_mean`, "
           "`completion_tokens_mean`, `truncated_fraction`; only with several `tasks` in the recipe.", on_page=True),
    Figure("reported", "For each task with sequences in the step, the mean of each number that its rewards and environments "
           "report (terms of the reward, `metrics` of an [environment](episodes.md#an-environment)), over the sequences that "
           "have the number, and of an episode's `turns`; only the 24 most frequent names. If names coincide, a term takes "
           "precedence over a metric, and a metric over `turns`.", on_page=True),
    Figure("group_reward_std", "Standard deviation of rewards inside a group, mean over groups.", "group_reward_std", "reward"),
    Figure("equal_reward_groups", "Share of the step's groups whose rewards are all equal, so that nothing can be learned "
           "from them.", "equal_reward_groups_ratio", summary={"steps_equal_rewards": "ones"}),
    Figure("heldout_accuracy", "Held-out accuracy of the last evaluation.", "heldout_accuracy_ratio", stays=True,
           event=NoneType),
    Figure("heldout_accuracy_lower_bound", "Held-out accuracy of the last evaluation if problems without a verdict count as "
           "wrong.", "heldout_accuracy_lower_bound_ratio", stays=True, event=NoneType),
    Figure("heldout_unanswered", "Held-out problems without a verdict in the last evaluation; `heldout_accuracy` leaves them "
           "out.", "heldout_unanswered_problems", "problems", stays=True, event=NoneType),
    Figure("heldout_version", "Version that the evaluation measured.", event=NoneType),
    Figure("heldout_tokens", "Completion tokens of evaluations; `tokens_generated` does not include them.",
           "heldout_tokens_total", event=NoneType, summary={"heldout_tokens": "sum"}),
    Figure("heldout_sets", "Object for each set of problems of the evaluation, by name: `accuracy` (`value`, and `low` and "
           "`high` of its 95 % interval), `lower_bound`, `unanswered`, `reported` (over the answers with a verdict), and "
           "`pass_at` if `evaluation.samples` is above 1: an object like `accuracy` for each k.", event=NoneType),
    Figure("commits_held_s", "Seconds for which evaluations and probes [kept later versions from being "
           "committed](weight-updates.md#holding-a-version-still).", "commits_held_seconds_total", event=float,
           summary={"commits_held_s": "sum"}),
    Figure("sequences_trained", "Sequences that the step trained on, without the failed and stale ones of their groups; 0 for "
           "a skipped step."),
    Figure("tokens_trained", "Sampled tokens of the step; 0 for a skipped step.",
           summary={"tokens_trained": "sum", "tokens_per_s.trained": "rate"}, weight=_COMPUTE),
    Figure("tokens_computed", "Tokens that went through the model. A prompt that sequences of a micro-batch share counts "
           "once, and the last token of a completion does not count.", summary={"tokens_per_s.computed": "rate"},
           weight=_COMPUTE),
    Figure("microbatches", "Micro-batches of the step, each with one forward pass; one in which all advantages are 0 has no "
           "backward pass."),
    Figure("packing_fill", "`tokens_computed` / (`microbatches` × `trainer.tokens_per_microbatch`).", "packing_fill_ratio"),
    Figure("completion_tokens_mean", "Mean sampled tokens of the step's sequences, over all turns and branches.",
           "completion_length_tokens", on_page=True),
    Figure("turns_mean", "Mean turns of the step's [episodes](episodes.md#what-is-trained); only with episodes.",
           "episode_turns", "turns"),
    Figure("branches_mean", "Mean branches of the step's episodes; only with episodes.", "episode_branches", "branches"),
    Figure("observed_fraction", "Share of the tokens after the prompts that environments added, which are context and not "
           "trained on; only with episodes.", "observed_ratio"),
    Figure("multi_version_fraction", "Share of the step's sequences that more than one version sampled.", "multi_version_ratio",
           summary={"sequences_multi_version_fraction": "mean"}, weight="sequences_trained"),
    Figure("truncated_fraction", "Share of the step's sequences that were cut at `sampling.max_tokens`, or at the room that "
           "their prompt left in `model.max_context`; for episodes, in their last turn.", "truncated_ratio", on_page=True,
           summary={"sequences_truncated_fraction": "mean"}, weight="sequences_trained"),
    Figure("tokens_generated", "Sampled tokens that have reached the trainer since the start of the run."),
    Figure("tokens_generated_per_s", "Sampled tokens that reached the trainer per second since the previous step.",
           on_page=True),
    Figure("tokens_trained_per_s", "Trained tokens per second since the previous step.", on_page=True),
    Figure("in_flight", "Sequences in progress, or in complete groups whose step has not begun."),
    Figure("in_flight_limit", "Freshness limit on `in_flight`; null in conventional mode."),
    Figure("sequences", "Ledger after the step: `issued`, `trained`, `dropped_stale`, `dropped_filtered`, `failed`, "
           "`in_flight`."),
    Figure("step_s", "Seconds by phase: `wait` (for a batch), `compute`, `snapshot`, `send` (waiting for the previous version "
           "to be served, until sending began), `checkpoint`, and `total`.", on_page=True),
    Figure("compute_s", "Seconds by phase: `plan` and `build` (packing the micro-batches, during the previous step), and the "
           "parts of `step_s.compute`: `to_device`, `forward_backward`, `totals` (sums of the loss over micro-batches and "
           "ranks), `optimizer`; see below."),
    Figure("idle_s", "Seconds in which the trainer computed nothing because of the weight update: `snapshot` and `send`.",
           summary={"idle_s_mean": "mean"}),
    Figure("tokens_per_s", "Tokens per second of the step's computation: `trained` (sampled tokens) and `computed` (as "
           "`tokens_computed`); `tokens_trained_per_s` counts all seconds.", "tokens_per_second",
           labels={"tokens": ("trained", "computed")}),
    Figure("mfu", "[Model FLOPs utilization](#model-flops-utilization) of the step's computation; null if the device's peak is "
           "unknown, as on a CPU.", "mfu_ratio", summary={"mfu_mean": "mean"}, weight=_COMPUTE),
    Figure("imbalance", "Share of the ranks' compute time in which they wait for each other, estimated by the costs that the "
           "packing assumes.", "imbalance_ratio"),
    Figure("memory_peak_gib", "Peak memory, GiB: of tensors on a GPU since the previous step, or, on a CPU, of the process "
           "since its start.", summary={"memory_peak_gib": "largest"}),
    Figure("weight_update", "Newest update that was served; see below.", on_page=True, event=NoneType),
    Figure("stall_s", "Longest stall of a member in the newest served update, seconds.", on_page=True, event=NoneType),
    Figure("joins", "Actors that received the served version in side groups: `actor`, `version`, and `join_s`, the seconds "
           "until `serving`.", event=list),
    Figure("logprob_mismatch", "Largest log-probability difference of the probes, nats, over answers that can be compared.",
           "logprob_mismatch_nats", stays=True, event=NoneType, summary={"logprob_mismatch_max": "largest"}),
    Figure("parity_failures", "Probe answers that fail [the parity probe](weight-updates.md#the-parity-probe): they differ by "
           "more than `weights.probe_tolerance`, show a wrong share of the change that training made, have another length, or "
           "either side is not finite.", "parity_failures_total", "answers", event=int, summary={"parity_failures": "sum"}),
    Figure("actor_busy_fraction", "Share of the time since their engines were up in which actors had a sequence in progress.",
           "actor_busy_ratio", on_page=True),
    Figure("trainer_busy_fraction", "Share of the time since the trainer was ready that went into optimizer steps.",
           "trainer_busy_ratio", on_page=True),
)  # fmt: skip
"""Every figure, in the order of docs/run-directory.md."""

ON_PAGE = tuple(figure.key for figure in FIGURES if figure.on_page)


def no_events() -> dict[str, Any]:
    """Return the values of the figures that describe events, for the case that none has happened since the previous step."""
    return {figure.key: figure.event() for figure in FIGURES if figure.event}


def plain(text: str) -> str:
    """Return Markdown without its links and backticks."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text).replace("`", "")


RUN_FIGURES = {key: (reduction, figure) for figure in FIGURES for key, reduction in figure.summary.items()}
"""Figures of the run by their key in summary.json."""

Reduced = dict[str, list[float]]
"""Combined value and sum of the weights, by key in summary.json."""

_COMBINED: Mapping[Reduction, Callable[[float, float, float], float]] = {
    "sum": lambda total, value, weight: total + value,
    "rate": lambda total, value, weight: total + value,
    "mean": lambda total, value, weight: total + value * weight,
    "ones": lambda total, value, weight: total + (value == 1),
    "last": lambda total, value, weight: value,
    "smallest": lambda total, value, weight: min(total, value),
    "largest": lambda total, value, weight: max(total, value),
}


def reduce_step(reduced: Reduced, record: Mapping[str, Any], *, events: bool) -> None:
    """Add one record's finite numbers to `reduced`: the figures of events if `events` is true, the others if it is false."""
    for key, (reduction, figure) in RUN_FIGURES.items():
        value, is_event = record.get(figure.key), figure.event is not None
        if is_event is not events or value is None or not math.isfinite(value) or (figure.trained and record.get("skipped")):
            continue
        outer, _, inner = figure.weight.partition(".")
        weight = ((record.get(outer) or {}).get(inner) or 0) if inner else record.get(outer, 1)
        total, weights = reduced.get(key, (value if reduction in ("smallest", "largest") else 0, 0))
        reduced[key] = [_COMBINED[reduction](total, value, weight), weights + weight]


def run_figures(reduced: Reduced) -> dict[str, Any]:
    """Return the part of summary.json that follows from figures. Without any step, counts are 0 and all other figures None."""
    found: dict[str, Any] = {}
    for key, (reduction, _) in RUN_FIGURES.items():
        total, weights = reduced.get(key, (0 if reduction in ("sum", "ones") else None, 0))
        if total is not None and reduction in ("mean", "rate"):
            total = total / weights if weights else None
        outer, _, inner = key.partition(".")
        found |= {outer: {**found.get(outer, {}), inner: total}} if inner else {outer: total}
    return found
