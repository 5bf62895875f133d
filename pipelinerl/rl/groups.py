"""Decide how many prompt groups may be issued and which of their sequences may be trained on; compute advantages and lag.

**The feeder's bound.** Every step consumes exactly K = B / n groups. A group is *lost* if none of its samples is trained on;
then another group replaces it. Let N be the number of groups issued and not lost since the run's start, and v the oldest
version that any actor serves.

With max_lag, keep `N <= (v + 1 + max_lag) * K` whenever a group is issued. A group issued at version v is then number
`(v + 1 + max_lag) * K` or earlier in the order of issue. A trainer that consumes in this order uses it at version `v + max_lag`
or before, so its tokens have lag <= max_lag. Groups finish out of order, so the trainer checks the lag of every sequence. A
group that is too old is lost and no longer in N, so the bound never starves the trainer.

In conventional mode, phase p consists of versions pG .. pG + G - 1 and issues at most G * K groups (B * G sequences).

**Freshness.** With the bound alone, actors that are faster than the trainer would fill a queue, and every sequence would become
as old as the bound allows. Pipeline mode therefore limits the samples in flight. A sample is in flight from its issue until the
step that uses its group begins, or the group is lost. While a sample waits for others of its group, it does not count.

With A actors of H slots, `A * (H + n) + B` samples are always enough: A * H for full slots, a next group of n for each actor,
and B for a waiting batch. The limit starts at this ceiling and never falls below B. It changes as follows:

- If a step had to wait for sequences, the limit rises, unless max_lag caused the wait.
- If actors are faster than the trainer, complete groups are left over when a step begins. The limit falls if two or more
  groups are left over in more than `limit / B` successive steps, the time in which the trainer uses up all samples in flight.
  It falls by a quarter of the smallest number of groups left over, rounded up to whole groups.
- After each change, these steps are counted anew, beginning when all groups issued before the change are complete.
- When an actor leaves, the limit returns to its ceiling, because the actor's samples stay in flight for up to half a minute.

**Lag** is counted in optimizer steps between the version that sampled a token and the version whose gradient is taken. A
version is (incarnation, number). After a restart from v = 20, version 25 of the previous incarnation no longer exists.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipelinerl.errors import FieldError
from pipelinerl.messages.sequences import PolicyVersion, Sequence, VersionSpan
from pipelinerl.recipe.fields import AlgorithmConfig, Recipe


def groups_per_step(recipe: Recipe) -> int:
    """Return K = B / n, the number of prompt groups that one optimizer step consumes."""
    return recipe.trainer.batch_size // recipe.sampling.group_size


def issue_limit(recipe: Recipe, version: int) -> int:
    """Return the maximum number of groups issued and not lost since the run's start, while `version` is served."""
    max_lag, phase_steps = recipe.algorithm.max_lag, recipe.algorithm.conventional_g
    if recipe.mode == "conventional":
        steps = (version // phase_steps + 1) * phase_steps
    else:
        steps = recipe.trainer.steps if max_lag is None else version + 1 + max_lag
    return min(steps, recipe.trainer.steps) * groups_per_step(recipe)


EVALUATION_SLOTS = 64
"""Number of held-out sequences and parity probes that an actor's scheduler admits in addition to H training sequences."""
WAIT_SHARE = 0.02
"""Share of a step's time that may be spent waiting for sequences without raising the freshness limit."""


class IssueRoom(NamedTuple):
    """Limits on issuing groups, and their reasons."""

    allowance: int
    """Groups that may be issued now."""
    by_version: int
    """Groups that the staleness bound alone would allow."""
    held_by_max_lag: bool
    """True if `max_lag`, not the end of the run, makes `by_version` 0."""
    in_flight: int
    """Samples that are in progress, or belong to groups that wait for a step. The freshness limit counts them."""
    limit: int | None
    """The freshness limit in samples; None in conventional mode, whose phases bound the samples in flight."""


class IssuedGroups(NamedTuple):
    """The prompt groups of a run, which are numbered in order of issue, from 0. `unlost`: how many were issued and not lost
    since the start of the run. `num_open`: how many are incomplete. `issued`: the next group's number. `oldest_open`: the
    oldest incomplete group's number, or `issued`."""

    unlost: int
    num_open: int
    issued: int
    oldest_open: int


class IssueBounds:
    """The staleness bound and, in pipeline mode, the freshness limit. In the methods, `unlost` is the number of groups issued
    and not lost since the start of the run, and `version` is the oldest version that an actor serves."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._group_size, self._batch_size = recipe.sampling.group_size, recipe.trainer.batch_size
        self._held_back = 0
        """Number of samples by which the freshness limit is below its ceiling."""
        self._num_actors = 0
        self._left_over: deque[int] = deque()
        """For each of the last steps (about limit / B), the number of complete groups that its batch left over. A step is added
        only if all groups that were issued before the last change of the freshness limit are complete when the step begins."""
        self._changed_at = 0
        """Number of the first group that was issued after the last change of the freshness limit."""
        self._waited = False
        self.steps_begun = 0

    def room(self, version: int, num_actors: int, unlost: int, num_waiting: int) -> IssueRoom:
        """Return how many groups may be issued now, and why. `num_waiting`: samples that wait for the rest of their group."""
        max_lag, steps = self._recipe.algorithm.max_lag, self._recipe.trainer.steps
        by_version = max(0, issue_limit(self._recipe, version) - unlost)
        bounded = self._recipe.mode == "pipeline" and max_lag is not None and version + 1 + max_lag < steps
        limit, in_flight = self.limit(num_actors), self._unused(unlost) * self._group_size - num_waiting
        fresh = by_version if limit is None else (limit - in_flight) // self._group_size
        return IssueRoom(max(0, min(by_version, fresh)), by_version, bounded and by_version == 0, in_flight, limit)

    def limit(self, num_actors: int) -> int | None:
        """Return the freshness limit, as in `IssueRoom`."""
        if self._recipe.mode == "conventional":
            return None
        held_back = self._held_back if num_actors >= self._num_actors else 0
        return max(self._batch_size, self._ceiling(num_actors) - held_back)

    @property
    def holds_actors_back(self) -> bool:
        """True if the freshness limit gives actors less work than they could do, because they are faster than the trainer."""
        return self._held_back > 0 and not self._waited

    def begin_step(self, num_actors: int, groups: IssuedGroups, wait_share: float, *, for_max_lag: bool) -> None:
        """Adapt the freshness limit when a step has its batch. `wait_share`: share of the time since the previous step that was
        spent waiting for sequences. `for_max_lag`: the staleness bound caused the wait, so a higher limit would not help."""
        self.steps_begun += 1
        limit = self.limit(num_actors)
        if limit is None:
            return
        self._waited = wait_share > WAIT_SHARE
        if groups.oldest_open >= self._changed_at:
            self._left_over.append(self._unused(groups.unlost) - groups.num_open)
        if self._waited and not for_max_lag:
            self._set(limit + max(self._group_size, limit // 8), num_actors, groups.issued)
        elif len(self._left_over) > limit / self._batch_size:
            standing = min(self._left_over)
            self._left_over.popleft()
            if standing > 1:
                self._set(limit - math.ceil(standing / 4) * self._group_size, num_actors, groups.issued)

    def _unused(self, unlost: int) -> int:
        return unlost - self.steps_begun * groups_per_step(self._recipe)

    def _ceiling(self, num_actors: int) -> int:
        return max(1, num_actors) * (self._recipe.samples_in_progress + self._group_size) + self._batch_size

    def _set(self, limit: int, num_actors: int, issued: int) -> None:
        ceiling = self._ceiling(num_actors)
        self._held_back, self._num_actors = ceiling - min(ceiling, max(self._batch_size, limit)), num_actors
        self._left_over.clear()
        self._changed_at = issued


def starts_phase(recipe: Recipe, version: int) -> bool:
    """Return whether actors get the policy of `version`: always in pipeline mode, every G steps in conventional mode."""
    return recipe.mode == "pipeline" or version % recipe.algorithm.conventional_g == 0


def groups_before_step(recipe: Recipe, version: int) -> int:
    """Return how many groups must be complete before the step at `version` starts: those of one batch in pipeline mode, and
    those of all remaining steps of the phase in conventional mode. The run's last phase may be shorter."""
    phase_steps = recipe.algorithm.conventional_g
    steps = phase_steps - version % phase_steps if recipe.mode == "conventional" else 1
    return min(steps, recipe.trainer.steps - version) * groups_per_step(recipe)


def untrainable_reason(sequence: Sequence, max_context: int, vocab_size: int) -> str:
    """Return why `sequence` cannot be trained on, or "". `max_context`: limit of a branch's prompt and completion tokens."""
    if sequence.failure:
        return sequence.failure
    if any(branch.num_tokens > max_context for branch in sequence.all_branches):
        return "longer than the context"
    token_ids = [ids for one in sequence.all_branches for ids in (one.prompt_token_ids, one.completion_token_ids)]
    return "token outside the vocabulary" if max(ids.max() for ids in token_ids) >= vocab_size else ""


class StaleReason(StrEnum):
    """Reasons for the outcome `dropped_stale`."""

    LAG = "lag above max_lag"
    UNDONE = "version undone by a restart"
    UNKNOWN = "version not made by this run yet"


@dataclass(frozen=True)
class Lineage:
    """The versions that exist. `starts[i]` is the version that incarnation i + 1 began from; the first began from 0."""

    starts: tuple[int, ...] = (0,)

    @property
    def incarnation(self) -> int:
        """The running incarnation, counted from 1."""
        return len(self.starts)

    def restarted(self, from_version: int) -> Lineage:
        """Return the lineage after a restart from the checkpoint of `from_version`."""
        return Lineage((*self.starts, from_version))

    def reason_against(self, version: PolicyVersion, newest: int) -> StaleReason | None:
        """Return why `version` does not exist, or None if it exists. `newest`: the running incarnation's newest version."""
        if not 1 <= version.incarnation <= self.incarnation or version.number < self.starts[version.incarnation - 1]:
            return StaleReason.UNKNOWN
        if version.incarnation == self.incarnation:
            return StaleReason.UNKNOWN if version.number > newest else None
        return StaleReason.UNDONE if version.number > min(self.starts[version.incarnation :]) else None


FIRST_INCARNATION = Lineage()


def stale_reason(
    spans: tuple[VersionSpan, ...], version: int, algorithm: AlgorithmConfig, lineage: Lineage = FIRST_INCARNATION
) -> StaleReason | None:
    """Return why a sequence must not be trained on at policy version `version`, or None if it may be. It is stale if its lag
    (see `max_lag_of`) is above `algorithm.max_lag`, or if one of its versions was undone by a restart or never made."""
    for span in spans:
        reason = lineage.reason_against(PolicyVersion(span.incarnation, span.version), newest=version)
        if reason is not None:
            return reason
    if algorithm.max_lag is None or not spans:
        return None
    lags, weights = [version - span.version for span in spans], [span.end - span.start for span in spans]
    lag = max(lags) if algorithm.max_lag_of == "oldest_token" else float(np.average(lags, weights=weights))
    return StaleReason.LAG if lag > algorithm.max_lag else None


def length_bucket(num_tokens: int) -> int:
    """Return the upper end of a completion's bucket of lengths: 16, 32, 64 and so on."""
    return max(16, 1 << max(0, num_tokens - 1).bit_length())


Baseline = Literal["group_mean", "leave_one_out", "value"]

STD_FLOOR = 1e-6
"""Added to the standard deviation, so that advantages in a nearly constant group do not explode."""


def smallest_group(baseline: Baseline) -> int:
    """Return the smallest number of rewards with which the baseline works."""
    return 2 if baseline == "leave_one_out" else 1


def group_advantages(rewards: ArrayLike, baseline: Baseline, normalize_std: bool = False) -> NDArray[np.float64]:
    """Return the advantages, float64[n], of one group's n finite rewards. n is at least `smallest_group(baseline)`.

    `group_mean`: r_i - mean(r) (GRPO, arXiv 2402.03300). `leave_one_out`: r_i - mean of the others (RLOO, arXiv 2402.14740).
    `normalize_std` then divides by the group's sample standard deviation plus `STD_FLOOR`. `value`: r_i itself; the trainer
    subtracts the learned baseline token by token."""
    values = np.asarray(rewards, dtype=np.float64)
    if baseline == "value":
        return values.copy()
    shifted = values - values[0]  # so that equal rewards give exactly 0
    centred = shifted - shifted.mean()
    advantages = centred * (values.size / (values.size - 1)) if baseline == "leave_one_out" else centred
    if normalize_std and values.size > 1:
        advantages = advantages / (values.std(ddof=1) + STD_FLOOR)
    return advantages


def answer_reward(components: Mapping[str, float]) -> float | None:
    """Return the sum of a reward's answer terms, without format and length; None if it has no answer term."""
    terms = [term for name, term in components.items() if name == "answer" or name.startswith("answer.")]
    return sum(terms) if terms else None


def equally_right(samples: Iterable[Sequence]) -> bool:
    """Return whether all answers of a group earned the same reward. `filter_equal_rewards` (DAPO, arXiv 2503.14476) drops such
    groups. If rewards have answer terms, only these are compared, as equally right answers may differ in other terms."""
    earned = ((answer_reward(sample.reward_components), sample.reward) for sample in samples)
    return len({reward if answer is None else answer for answer, reward in earned}) == 1


CUTTING = ("ppo_clip", "grpo", "gspo")
"""Losses that give a token no gradient once its ratio has left the clip range in the direction of its advantage."""
MOST_CUT, CUT_STEPS = 0.25, 10
"""Largest acceptable share of clipped tokens, averaged over `CUT_STEPS` steps. GSPO's authors report about 0.15."""


def narrow_clip_range(algorithm: AlgorithmConfig, share: float) -> FieldError:
    """Return the warning about a clip range that clips `share` of the tokens."""
    cut = f"together with algorithm.clip_high ({algorithm.clip_high:g}) it clips {share:.0%} of the tokens, which then have no"
    fix = "widen algorithm.clip_low and algorithm.clip_high, or lower algorithm.max_lag or trainer.learning_rate"
    return FieldError("algorithm.clip_low", algorithm.clip_low, f"{cut} gradient; {fix}")


LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9-16", "17+")
"""Labels of lag buckets, in ascending order. Widths double because one more step matters at lag 1 but hardly at lag 100."""
_LARGEST_LAG_OF_BUCKET = np.array((0, 1, 2, 4, 8, 16))
"""Inclusive upper edge of each bucket but the last, in optimizer steps."""


def lag_bucket(lags: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each token's index into `LAG_BUCKETS`, int64[tokens], from its lag, int64[tokens]."""
    return np.searchsorted(_LARGEST_LAG_OF_BUCKET, lags, side="left")
