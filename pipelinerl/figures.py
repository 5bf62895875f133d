"""Declare each figure of an optimizer step once, in a table. Pure.

The trainer's metrics of steps, many keys of summary.json, the data of the run's pages and the tables of docs/run-directory.md
follow from this table. The learner, the optimizer loop and the recorder compute the figures.
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
"""Rule that combines the values of all steps into the run's figure. `ones` counts the steps whose value is 1 or true. `mean` is
weighted by `Figure.weight`. `rate` is the sum of the values divided by the sum of the weights."""


@dataclass(frozen=True)
class Figure:
    """A figure of an optimizer step. `key`: its key in metrics.jsonl. `text`: its meaning, in Markdown."""

    key: str
    text: str
    metric: str = ""
    """Name of the metric with this value; empty if there is none. A counter's name ends with `_total`."""
    unit: str = ""
    """Unit of the metric if its name does not end with it."""
    help: str = ""
    """Help text of the metric; empty = `text` is used."""
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """For a figure that is a mapping: the metric's label with its values, which are the keys of the mapping."""
    stays: bool = False
    """True if the metric keeps its value at a step without the figure, instead of having none."""
    on_page: bool = False
    event: type | None = None
    """For a figure about events since the previous step, such as evaluations: the type of the figure. Called without arguments,
    it returns the value for no events: 0, 0.0, [] or None. For every other figure, `event` is None."""
    summary: Mapping[str, Reduction] = field(default_factory=dict)
    """Keys in summary.json with their reductions. `ess.mean` is the key `mean` of the object `ess`."""
    weight: str = ""
    """Key, in the step's record, of the weight for `mean` and `rate`, such as `step_s.compute`. Empty = weight 1."""
    trained: bool = False
    """True if the summary's values leave out skipped steps."""


_LAG, _COMPUTE = {"lag": LAG_BUCKETS}, "step_s.compute"

FIGURES = (
    Figure("step", "Number of the optimizer step, counted from 1.", on_page=True),
    Figure("policy_version", "Version that this step made; it equals `step`."),
    Figure("served_version", "Newest version that every member serves when the line is written."),
    Figure("time_s", "Seconds since the trainer was first ready. Steps that a restart undid, and time without a trainer, "
           "do not count.", on_page=True),
    Figure("loss", "Loss of the whole batch, with the recipe's normalisation.", "loss", "none"),
    Figure("skipped", "Reason why the step changed no weight: `loss not finite` or `gradient not finite`; otherwise empty.",
           "steps_skipped_total", "steps", help="Optimizer steps that changed no weight."),
    Figure("grad_norm", "L2 norm of the policy's gradient before clipping, without a value head's.", "gradient_norm", "none",
           on_page=True),
    Figure("clipped", "True if the gradient was clipped to [the maximum norm](learning.md#the-optimizer).",
           "steps_clipped_total", "steps", help="Optimizer steps whose gradient was clipped to the maximum norm.",
           on_page=True, summary={"steps_clipped": "ones"}, trained=True),
    Figure("learning_rate", "Learning rate in this step.", "learning_rate", "none"),
    Figure("entropy", "Mean entropy of the policy at the positions of sampled tokens, nats.", "entropy_nats", on_page=True),
    Figure("ess", "Effective sample size (ESS) of the step's tokens, divided by their number; uses unclamped importance "
           "weights.", "ess_ratio", on_page=True, summary={"ess.mean": "mean", "ess.min": "smallest"}, trained=True),
    Figure("ess_by_lag", "ESS of the tokens of each lag, divided by the number of these tokens. The buckets of lags are "
           "`0`, `1`, `2`, `3-4`, `5-8`, `9-16` and `17+`.", "ess_by_lag_ratio", labels=_LAG),
    Figure("clip_fraction", "Share of the tokens at which the loss clipped or bounded the importance weight.", "clip_ratio"),
    Figure("clip_fraction_by_lag", "Share of the tokens of each lag at which the loss clipped or bounded the importance "
           "weight, in the same buckets.", "clip_by_lag_ratio", labels=_LAG),
    Figure("clip_range_cut", "Mean share of the tokens that `ppo_clip`, `grpo` or `gspo` clipped in the last ten steps; null "
           "unless this mean exceeds a quarter."),
    Figure("value_loss", "Loss of the learned baseline, weighted over tokens like the policy loss, without the factor "
           "`algorithm.value_coefficient`. Only if `algorithm.advantage` is `value`.", "value_loss", "none"),
    Figure("explained_variance", "1 − Var(R − v) / Var(R) over tokens, with the returns R and the learned baseline v. Only "
           "with a learned baseline, and if returns differ.", "explained_variance_ratio", stays=True),
    Figure("mask_fraction", "Share of the tokens that `algorithm.mask` left out of the policy loss.", "mask_ratio"),
    Figure("mismatch_kl", "KL estimate between actor and trainer, nats: mean of w − 1 − log w over tokens of lag 0, if any.",
           "mismatch_kl_nats", stays=True, on_page=True, summary={"mismatch_kl_mean": "mean"}, trained=True),
    Figure("reference_kl", "Estimated KL divergence from the initial policy, weighted over tokens like the policy loss, nats. "
           "Only if `algorithm.kl_coefficient` is above 0.", "reference_kl_nats"),
    Figure("log_weight_abs_max", "Largest |log π − log μ| of the step's tokens, nats."),
    Figure("lag", "`mean`, `p95` and `max` of the lag over the step's tokens.", on_page=True),
    Figure("lag_histogram", "Number of trained tokens by lag; empty for a skipped step.", on_page=True),
    Figure("ended_by_length", "Object from length to [number of sequences trained, number dropped as stale] since the previous "
           "step. The key `16` means up to 16 sampled tokens, `32` means 17 to 32, and so on."),
    Figure("held_by_max_lag", "True if `algorithm.max_lag` keeps the feeder from issuing more groups when the line is written. "
           "False if only the freshness limit or the end of the run stops the feeder."),
    Figure("max_lag_too_small", "True if `algorithm.max_lag` is below `largest_lag` and this has a cost: the trainer waits "
           "while `max_lag` holds the feeder, or more than 1 % of the ended sequences were dropped as stale.", on_page=True),
    Figure("largest_lag", "[Largest lag](architecture.md#staleness) predicted for full actors, from the number of members and "
           "the lengths since the trainer started; G − 1 in conventional mode.", on_page=True, summary={"largest_lag": "last"}),
    Figure("advantage_abs_mean", "Mean |advantage| of the step's sequences; 0 if no group gives a signal."),
    Figure("reward_mean", "Mean reward of the step's sequences.", "reward_mean", "reward", on_page=True),
    Figure("reward_std", "Standard deviation of the rewards of the step's sequences.", "reward_std", "reward"),
    Figure("tasks", "For each task with sequences in the step, by name, an object with `sequences`, `reward_mean`, "
           "`completion_tokens_mean` and `truncated_fraction`. Only with several `tasks` in the recipe.", on_page=True),
    Figure("reported", "For each task with sequences in the step, the mean of each number that its rewards and environments "
           "report: terms of the reward, `metrics` of an [environment](episodes.md#an-environment), and an episode's `turns`. "
           "The mean is over the sequences that have the number. Only the 24 most frequent names are kept. If names coincide, "
           "a term takes precedence over a metric, and a metric over `turns`.", on_page=True),
    Figure("group_reward_std", "Standard deviation of rewards within a group, mean over groups.", "group_reward_std", "reward"),
    Figure("equal_reward_groups", "Share of the step's groups whose rewards are all equal. Unless "
           "`algorithm.advantage` is `value`, nothing can be learned from them.", "equal_reward_groups_ratio",
           summary={"steps_equal_rewards": "ones"}),
    Figure("groups_all_right", "Among the step's groups with an answer term, the share in which every answer earned at least "
           "`reward.correct`. Most environments have no answer term."),
    Figure("groups_all_wrong", "Among the step's groups with an answer term, the share in which no answer earned anything."),
    Figure("identical_groups", "Share of the step's groups whose completions are all the same text."),
    Figure("term_spread", "For each term of the reward (at most 24), by name, its standard deviation within a group, averaged "
           "over the groups that have the term. Only with several terms."),
    Figure("answers_absent", "Share of the step's sequences in which the reward found no answer; not with episodes."),
    Figure("answers_missed", "Share of the step's sequences in which the reward found no answer although the reference occurs "
           "in the completion; not with episodes."),
    Figure("heldout_accuracy", "Held-out accuracy of the last evaluation.", "heldout_accuracy_ratio", stays=True,
           event=NoneType),
    Figure("heldout_accuracy_lower_bound", "Held-out accuracy of the last evaluation, with problems without a verdict "
           "counted as wrong.", "heldout_accuracy_lower_bound_ratio", stays=True, event=NoneType),
    Figure("heldout_unanswered", "Number of held-out problems without a verdict in the last evaluation; `heldout_accuracy` "
           "leaves them out.", "heldout_unanswered_problems", "problems", stays=True, event=NoneType),
    Figure("heldout_version", "Version that the evaluation measured.", event=NoneType),
    Figure("heldout_tokens", "Completion tokens sampled for evaluations; `tokens_generated` does not include them.",
           "heldout_tokens_total", event=NoneType, summary={"heldout_tokens": "sum"}),
    Figure("heldout_sets", "For each set of problems in the evaluation, by name, an object with `accuracy` (`value`, and "
           "`low` and `high` of its 95 % interval), `lower_bound`, `unanswered`, `reported` (over the answers with a verdict) "
           "and, if `evaluation.samples` is above 1, `pass_at`: an object like `accuracy` for each k.", event=NoneType),
    Figure("commits_held_s", "Seconds for which evaluations and probes [kept later versions from being "
           "committed](weight-updates.md#holding-a-version-still).", "commits_held_seconds_total", event=float,
           summary={"commits_held_s": "sum"}),
    Figure("sequences_trained", "Number of sequences that the step trained on, without the failed and stale ones of its "
           "groups. 0 for a skipped step."),
    Figure("tokens_trained", "Number of sampled tokens that the step trained on; 0 for a skipped step.",
           summary={"tokens_trained": "sum", "tokens_per_s.trained": "rate"}, weight=_COMPUTE),
    Figure("tokens_computed", "Number of tokens that the model computed. A prompt shared by sequences of a micro-batch counts "
           "once; the last token of a completion does not count.", summary={"tokens_per_s.computed": "rate"},
           weight=_COMPUTE),
    Figure("microbatches", "Number of micro-batches in the step. Each has a forward pass. It also has a backward pass unless "
           "its gradient is 0, because all advantages are 0 and there is no KL or entropy term."),
    Figure("packing_fill", "`tokens_computed` / (`microbatches` × `trainer.tokens_per_microbatch`).", "packing_fill_ratio"),
    Figure("completion_tokens_mean", "Mean number of sampled tokens per sequence of the step, over all its turns and branches.",
           "completion_length_tokens", on_page=True),
    Figure("turns_mean", "Mean number of turns per [episode](episodes.md#what-is-trained) of the step; only in runs with "
           "episodes.", "episode_turns", "turns"),
    Figure("branches_mean", "Mean number of branches per episode; only in runs with episodes.", "episode_branches", "branches"),
    Figure("observed_fraction", "Share of the tokens after the prompts that are observations of environments, which are not "
           "trained on; only in runs with episodes.", "observed_ratio"),
    Figure("multi_version_fraction", "Share of the step's sequences whose tokens were sampled by more than one version.",
           "multi_version_ratio", summary={"sequences_multi_version_fraction": "mean"}, weight="sequences_trained"),
    Figure("truncated_fraction", "Share of the step's sequences that were cut at `sampling.max_tokens` or at the end of "
           "`model.max_context`; in an episode, the last turn decides.", "truncated_ratio", on_page=True,
           summary={"sequences_truncated_fraction": "mean"}, weight="sequences_trained"),
    Figure("tokens_generated", "Number of sampled tokens that have reached the trainer since the start of the run."),
    Figure("tokens_generated_per_s", "Sampled tokens that have reached the trainer since the previous step, per second.",
           on_page=True),
    Figure("tokens_trained_per_s", "`tokens_trained` per second since the previous step.", on_page=True),
    Figure("in_flight", "Number of sequences that have not arrived, or are in complete groups whose step has not begun."),
    Figure("in_flight_limit", "Freshness limit on `in_flight`; null in conventional mode."),
    Figure("sequences", "Ledger after the step: `issued`, `trained`, `dropped_stale`, `dropped_filtered`, `failed`, "
           "`in_flight`."),
    Figure("step_s", "Seconds of each phase: `wait` (for a batch), `compute`, `snapshot`, `send` (waiting until the previous "
           "version is served and sending can begin), `checkpoint`, and `total`.", on_page=True),
    Figure("compute_s", "Seconds of each part of the computation. `plan` and `build` pack the micro-batches during the "
           "previous step. The others are parts of `step_s.compute`: `to_device`, `forward_backward`, `totals` (sums over "
           "micro-batches and ranks) and `optimizer`. See below."),
    Figure("idle_s", "Seconds in which the weight update kept the trainer from computing: `snapshot` and `send` of `step_s`.",
           summary={"idle_s_mean": "mean"}),
    Figure("tokens_per_s", "Tokens per second of the step's computation: `trained` from `tokens_trained`, `computed` from "
           "`tokens_computed`. (`tokens_trained_per_s` is per second of the whole step.)", "tokens_per_second",
           labels={"tokens": ("trained", "computed")}),
    Figure("mfu", "[Model FLOPs utilization](#model-flops-utilization) of the step's computation. Only if the device's peak is "
           "known, so not on a CPU.", "mfu_ratio", summary={"mfu_mean": "mean"}, weight=_COMPUTE),
    Figure("imbalance", "Share of the ranks' compute time in which they wait for each other, estimated from the costs that the "
           "packing assumes.", "imbalance_ratio"),
    Figure("memory_peak_gib", "Peak memory, GiB: on a GPU, that of tensors since the previous step; on a CPU, that of the "
           "process since its start.", summary={"memory_peak_gib": "largest"}),
    Figure("weight_update", "Newest weight update that was served; see below.", on_page=True, event=NoneType),
    Figure("stall_s", "Longest stall of a member in the newest served weight update, seconds.", on_page=True, event=NoneType),
    Figure("joins", "List of actors that received the served version in side groups, each with `actor`, `version` and "
           "`join_s`, the seconds until it served the version.", event=list),
    Figure("logprob_mismatch", "Largest difference of log-probabilities in parity probes, nats, over answers that can be "
           "compared.", "logprob_mismatch_nats", stays=True, event=NoneType, summary={"logprob_mismatch_max": "largest"}),
    Figure("parity_failures", "Number of answers that fail [the parity probe](weight-updates.md#the-parity-probe): they differ "
           "from the trainer's by more than `weights.probe_tolerance`, have changed too little or too much since the "
           "trainer's start, have a wrong length, or are not finite.", "parity_failures_total", "answers", event=int,
           summary={"parity_failures": "sum"}),
    Figure("actor_busy_fraction", "Share of the actors' time, since their engines were up, in which they had a sequence in "
           "progress.", "actor_busy_ratio", on_page=True),
    Figure("trainer_busy_fraction", "Share of the run's time with a ready trainer in which it computed optimizer steps.",
           "trainer_busy_ratio", on_page=True),
)  # fmt: skip
"""Every figure, in the order of docs/run-directory.md."""

ON_PAGE = tuple(figure.key for figure in FIGURES if figure.on_page)


def no_events() -> dict[str, Any]:
    """Return, by key, each figure about events with the value that it has if no event happened since the previous step."""
    return {figure.key: figure.event() for figure in FIGURES if figure.event}


def plain(text: str) -> str:
    """Return Markdown without its links and backticks."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text).replace("`", "")


RUN_FIGURES = {key: (reduction, figure) for figure in FIGURES for key, reduction in figure.summary.items()}
"""For each key of summary.json whose value combines one figure over all steps: the `Reduction` and the figure."""

Reduced = dict[str, list[float]]
"""For each key of summary.json: the value combined over the steps, and the sum of the steps' weights in a mean or rate."""

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
    """Combine a record's finite numbers with `reduced`: only figures about events if `events` is true, else only the others."""
    for key, (reduction, figure) in RUN_FIGURES.items():
        value, is_event = record.get(figure.key), figure.event is not None
        if is_event is not events or value is None or not math.isfinite(value) or (figure.trained and record.get("skipped")):
            continue
        outer, _, inner = figure.weight.partition(".")
        weight = ((record.get(outer) or {}).get(inner) or 0) if inner else record.get(outer, 1)
        total, weights = reduced.get(key, (value if reduction in ("smallest", "largest") else 0, 0))
        reduced[key] = [_COMBINED[reduction](total, value, weight), weights + weight]


def run_figures(reduced: Reduced) -> dict[str, Any]:
    """Return the part of summary.json that combines figures of all steps. Without steps, sums and counts are 0, others None."""
    found: dict[str, Any] = {}
    for key, (reduction, _) in RUN_FIGURES.items():
        total, weights = reduced.get(key, (0 if reduction in ("sum", "ones") else None, 0))
        if total is not None and reduction in ("mean", "rate"):
            total = total / weights if weights else None
        outer, _, inner = key.partition(".")
        found |= {outer: {**found.get(outer, {}), inner: total}} if inner else {outer: total}
    return found
