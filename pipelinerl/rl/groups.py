"""Prompt groups: how many may be issued, which of their sequences may be trained on, with which advantages; and token lag.

**The feeder's bound** says how many prompt groups may be issued at version v. Every step consumes exactly K = B / n groups,
also when some of their samples failed: counted in sequences, a failed sample would let one more into flight for good, and
the bound would loosen with every failure. Let N(v) be the groups issued and not lost, where a *lost* group is one of which
nothing is trained (stale, filtered, all samples failed); it is issued again, so it leaves N.

With max_lag, keep `N(v) <= (v + 1 + max_lag) * K` whenever a group is issued. A group issued at version v is then at most
number `(v + 1 + max_lag) * K` in order of issue, so a trainer that consumes in that order uses it in step `v + max_lag` or
before: tokens sampled at v or later have lag <= max_lag when they are used. Groups finish out of order, so a long one can
be overtaken; the trainer checks every sequence, and an overtaken one whose lag grew beyond max_lag is dropped, leaves N and
is issued again: the bound never starves the trainer. Tokens may be older than the version of the issue while actors still
serve an older one: v is the oldest version that actors serve, rather than the trainer's own, so that the bound holds for
them too.

In conventional mode, phase p covers versions pG .. pG + G - 1 and issues exactly G * K groups (B * G sequences).

**Freshness.** The bound alone makes lag the age of a queue: actors that are faster than the trainer fill it, and every sequence
waits until it is as old as the bound allows. In pipeline mode a limit keeps no more in flight than both sides need. In
flight are the samples that were issued and not lost, and whose step has not begun; except those that have arrived and wait for
others of their group, since they occupy no slot of an actor, and no step can use them.

With A actors of H slots, `A * (H + n) + B` samples are always enough: a batch waits, all slots are busy, and each actor finds a
next group. This ceiling is also the start. The floor is B. In between, the limit follows what is measured when a step begins.
If the trainer had to wait, the limit rises. A change has had its effect when every group that was issued before it is complete,
the longest included. If from then on complete groups are left over at each of `limit / B + 1` steps, this standing queue only
makes sequences older, and the limit falls by a quarter of it, if it is more than one group.
Actors that are too fast idle for a part of the time, instead of stockpiling. When an actor is gone the limit is at its ceiling
again: what that actor had in hand is still in flight, for up to half a minute, and the others would run out of work.

**Lag** is counted in optimizer steps between the version that sampled a token and the version whose gradient is taken. A
version is (incarnation, number): after a restart from v = 20, version 25 of the incarnation before is a policy that no
longer exists, whatever its number.

**Effective sample size**: (Σ w)² / (N Σ w²), 1 when on-policy. Weights are unclamped, whatever the loss does.

**Advantages** are of a group's good samples. The learned baseline of the paper's equation 4 is the trainer's to subtract: here
`value` leaves rewards unchanged.

Not here: which problem comes next, and what happens to a stale sequence (`ledger.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipelinerl.errors import FieldError
from pipelinerl.messages.sequences import PolicyVersion, Sequence, VersionSpan
from pipelinerl.recipe.fields import AlgorithmConfig, Recipe


def groups_per_step(recipe: Recipe) -> int:
    """K = B / n."""
    return recipe.trainer.batch_size // recipe.sampling.group_size


def issue_limit(recipe: Recipe, version: int) -> int:
    """Groups that may have been issued and not lost by the time of `version`, since the start of the run. Nothing is issued
    that no step would consume."""
    max_lag, phase_steps = recipe.algorithm.max_lag, recipe.algorithm.conventional_g
    if recipe.mode == "conventional":
        steps = (version // phase_steps + 1) * phase_steps
    else:
        steps = recipe.trainer.steps if max_lag is None else version + 1 + max_lag
    return min(steps, recipe.trainer.steps) * groups_per_step(recipe)


EVALUATION_SLOTS = 64
"""Held-out sequences and probes that an actor's scheduler admits beside its H."""
WAIT_SHARE = 0.02
"""Of a step's time: a shorter wait for sequences changes nothing."""


class IssueBounds:
    """How many groups may be issued now, by the staleness bound and, in pipeline mode, by the freshness limit.

    Stepped when an optimizer step begins. `unlost`: groups that were issued and not lost, since the start of the run.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._group_size, self._batch_size = recipe.sampling.group_size, recipe.trainer.batch_size
        self._held_back = 0
        """Samples by which the freshness limit is below its ceiling: so it follows the number of actors."""
        self._num_actors = 0
        """When that was found."""
        self._left_over: deque[int] = deque()
        """Complete groups that the last steps left, since a change of the limit has had its effect."""
        self._changed_at = 0
        """Number of the first group that was issued under the limit."""
        self._waited = False
        self.steps_begun = 0
        """Optimizer steps that have their batch."""

    def by_version(self, version: int, unlost: int) -> int:
        """Groups, by the staleness bound alone. `version`: that every actor serves."""
        return max(0, issue_limit(self._recipe, version) - unlost)

    def held_by_max_lag(self, version: int, unlost: int) -> bool:
        """Whether the staleness bound allows no more, for the sake of `max_lag` and not since the run ends."""
        max_lag, steps = self._recipe.algorithm.max_lag, self._recipe.trainer.steps
        bounded = self._recipe.mode == "pipeline" and max_lag is not None and version + 1 + max_lag < steps
        return bounded and self.by_version(version, unlost) == 0

    def allowance(self, version: int, num_actors: int, unlost: int, num_waiting: int) -> int:
        """Groups, by both. `num_waiting`: samples that have arrived of groups that are not complete."""
        by_version, limit = self.by_version(version, unlost), self.limit(num_actors)
        if limit is None:
            return by_version
        return max(0, min(by_version, (limit - self.in_flight(unlost, num_waiting)) // self._group_size))

    def limit(self, num_actors: int) -> int | None:
        """The freshness limit, in samples; None in conventional mode, whose phases bound what is in flight.

        Its ceiling where actors are missing: what they had in hand is in flight until others get it, and these have less."""
        if self._recipe.mode == "conventional":
            return None
        held_back = self._held_back if num_actors >= self._num_actors else 0
        return max(self._batch_size, self._ceiling(num_actors) - held_back)

    def in_flight(self, unlost: int, num_waiting: int) -> int:
        """Samples that count against the freshness limit."""
        return self._unused(unlost) * self._group_size - num_waiting

    @property
    def holds_actors_back(self) -> bool:
        """Whether actors that outrun the trainer are given less than they could do."""
        return self._held_back > 0 and not self._waited

    def begin_step(
        self,
        num_actors: int,
        unlost: int,
        num_open: int,
        wait_share: float,
        *,
        for_max_lag: bool,
        issued: int,
        oldest_open: int,
    ) -> None:
        """A step has its batch. `num_open`: groups that are not complete; `oldest_open`: number of the oldest of them, in order
        of issue from 0; `issued`: the next group's number. `wait_share`: of the time since the step before, in which the
        trainer waited for sequences; `for_max_lag`: since the staleness bound held actors back, which no limit mends."""
        self.steps_begun += 1
        limit = self.limit(num_actors)
        if limit is None:
            return
        self._waited = wait_share > WAIT_SHARE
        if oldest_open >= self._changed_at:
            self._left_over.append(self._unused(unlost) - num_open)
        if self._waited and not for_max_lag:
            self._set(limit + max(self._group_size, limit // 8), num_actors, issued)
        elif len(self._left_over) > limit / self._batch_size:
            standing = min(self._left_over)
            self._left_over.popleft()
            if standing > 1:
                self._set(limit - math.ceil(standing / 4) * self._group_size, num_actors, issued)

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
    """Whether μ becomes π at `version`: always in pipeline mode, every G steps in conventional mode."""
    return recipe.mode == "pipeline" or version % recipe.algorithm.conventional_g == 0


def groups_before_step(recipe: Recipe, version: int) -> int:
    """Groups that must be complete before the step at `version` starts: conventional mode trains when its whole
    phase is generated (and shuffles it), pipeline mode as soon as one batch is there. The run's last phase may be shorter."""
    phase_steps = recipe.algorithm.conventional_g
    steps = phase_steps - version % phase_steps if recipe.mode == "conventional" else 1
    return min(steps, recipe.trainer.steps - version) * groups_per_step(recipe)


def untrainable_reason(sequence: Sequence, max_context: int, vocab_size: int) -> str:
    """Why `sequence` ends as failed, short and from a fixed set except for the actor's own reason; "" when it is good.

    `max_context`: prompt plus completion tokens of a branch at most. `vocab_size`: token ids are below it.
    """
    if sequence.failure:
        return sequence.failure
    if any(branch.num_tokens > max_context for branch in sequence.all_branches):
        return "longer than the context"
    token_ids = [ids for one in sequence.all_branches for ids in (one.prompt_token_ids, one.completion_token_ids)]
    return "token outside the vocabulary" if max(ids.max() for ids in token_ids) >= vocab_size else ""


class StaleReason(StrEnum):
    """Why a sequence ends as `dropped_stale`; the ledger counts by these."""

    LAG = "lag above max_lag"
    UNDONE = "version undone by a restart"
    UNKNOWN = "version not made by this run yet"


@dataclass(frozen=True)
class Lineage:
    """Which versions exist. `starts[i]` is the version that incarnation i + 1 began from; the first began from 0."""

    starts: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        assert self.starts, "a lineage has at least one incarnation"
        assert self.starts[0] == 0, "the first incarnation starts from version 0"
        assert all(start >= 0 for start in self.starts), f"negative version in {self.starts}"

    @property
    def incarnation(self) -> int:
        """The running incarnation, counted from 1."""
        return len(self.starts)

    def restarted(self, from_version: int) -> Lineage:
        """The lineage after a restart from the checkpoint of `from_version`."""
        return Lineage((*self.starts, from_version))

    def reason_against(self, version: PolicyVersion, newest: int) -> StaleReason | None:
        """None when `version` is a recorded policy of this run, at most `newest`, that no restart undid."""
        if not 1 <= version.incarnation <= self.incarnation or version.number < self.starts[version.incarnation - 1]:
            return StaleReason.UNKNOWN
        if version.incarnation == self.incarnation:
            return StaleReason.UNKNOWN if version.number > newest else None
        return StaleReason.UNDONE if version.number > min(self.starts[version.incarnation :]) else None


FIRST_INCARNATION = Lineage()


def stale_reason(
    spans: tuple[VersionSpan, ...], version: int, algorithm: AlgorithmConfig, lineage: Lineage = FIRST_INCARNATION
) -> StaleReason | None:
    """Why a sequence must not be trained on at policy version `version`; None when it may.

    Its lag is above `algorithm.max_lag`: that of its oldest token, or the mean over its tokens (`max_lag_of`). Or it has a
    token, and one is enough, of a version that a restart undid or that this run has not made.
    """
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
    """Upper end of the power-of-two bucket that a completion's length falls into; 16 is the first."""
    return max(16, 1 << max(0, num_tokens - 1).bit_length())


Baseline = Literal["group_mean", "leave_one_out", "value"]

STD_FLOOR = 1e-6
"""Added to the standard deviation, in units of reward, so that a nearly constant group does not explode."""


def smallest_group(baseline: Baseline) -> int:
    """Rewards that the baseline needs at least. A group with fewer good samples cannot be trained on."""
    return 2 if baseline == "leave_one_out" else 1


def group_advantages(
    rewards: list[float] | tuple[float, ...] | NDArray[np.floating],
    baseline: Baseline = "leave_one_out",
    normalize_std: bool = False,
) -> NDArray[np.float64]:
    """Advantage of each sample of one group, float64[n], for rewards [n].

    `group_mean`: r_i - mean(r) (GRPO, arXiv 2402.03300). `leave_one_out`: r_i - mean of the others (RLOO, arXiv
    2402.14740), which is n / (n - 1) times the former. `normalize_std` then divides by the group's sample standard
    deviation (n - 1 in the denominator) plus `STD_FLOOR`. Equal rewards give exactly 0. `value`: r_i itself, of which the
    learned baseline is subtracted token by token (`services/trainer/learn/loss.py`).

    Raises `FieldError` for non-finite rewards and for fewer than `smallest_group(baseline)` of them.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise FieldError("rewards", values.tolist(), "rewards must be finite; fail such samples before this point")
    if values.size < smallest_group(baseline):
        raise FieldError("rewards", values.tolist(), f"baseline {baseline} needs {smallest_group(baseline)} samples")
    if baseline == "value":
        return values.copy()
    shifted = values - values[0]
    centred = shifted - shifted.mean()
    advantages = centred * (values.size / (values.size - 1)) if baseline == "leave_one_out" else centred
    if normalize_std and values.size > 1:
        advantages = advantages / (values.std(ddof=1) + STD_FLOOR)
    return advantages


def all_equal(rewards: list[float] | tuple[float, ...] | NDArray[np.floating]) -> bool:
    """Whether a group carries no signal."""
    values = np.asarray(rewards, dtype=np.float64)
    return bool((values == values[0]).all())


def answer_reward(components: Mapping[str, float]) -> float | None:
    """What the answer alone earned, of a reward's terms: format and length do not count. None where no term is the answer's."""
    terms = [term for name, term in components.items() if name == "answer" or name.startswith("answer.")]
    return sum(terms) if terms else None


def equally_right(samples: Iterable[Sequence]) -> bool:
    """Whether a group is dropped by `filter_equal_rewards` (DAPO, arXiv 2503.14476): its answers earned the same.

    By the answers alone: where all are right, an overlong penalty still tells the samples apart, by their length. Rewards
    without terms are compared as they are.
    """
    earned = ((answer_reward(sample.reward_components), sample.reward) for sample in samples)
    return all_equal([reward if answer is None else answer for answer, reward in earned])


CUTTING = ("ppo_clip", "grpo", "gspo")
"""Losses that give no gradient to what has moved beyond their clip range."""
MOST_CUT, CUT_STEPS = 0.25, 10
"""Share of the tokens, in the mean over steps, from which a clip range is too narrow. GSPO's authors cut about 0.15."""


def narrow_clip_range(algorithm: AlgorithmConfig, share: float) -> FieldError:
    """What is wrong with a clip range that cuts `share` of the tokens."""
    fix = (
        f"with clip_high = {algorithm.clip_high:g}, algorithm.loss = {algorithm.loss!r} cuts {share:.0%} of the tokens, which "
        "then teach nothing. The ratio is to the policy that sampled them, up to max_lag steps ago; widen algorithm.clip_low "
        "and algorithm.clip_high, or lower algorithm.max_lag or trainer.learning_rate"
    )
    return FieldError("algorithm.clip_low", algorithm.clip_low, fix)


# --- figures of lag

LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9-16", "17+")
"""Labels, in order of lag. Widths double, because one step more matters at lag 1 and not at lag 100."""
_LARGEST_LAG_OF_BUCKET = np.array((0, 1, 2, 4, 8, 16))
"""Inclusive upper edge of each bucket but the last, which has none. Unit: optimizer steps."""


def lag_bucket(lags: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index into `LAG_BUCKETS` of each token: int64[tokens] for lags int64[tokens]."""
    return np.searchsorted(_LARGEST_LAG_OF_BUCKET, lags, side="left")


def effective_sample_size(log_weights: NDArray[np.float64]) -> float:
    """(Σ w)² / (N Σ w²) in (0, 1] for log_weights [tokens], nats: finite, and at least one.

    Weights are taken relative to the largest, so that e^±1000 neither overflow nor vanish.
    """
    weights = np.exp(log_weights - log_weights.max())
    return min(1.0, float(weights.sum() ** 2 / (weights.size * (weights * weights).sum())))


def ess_by_lag(log_weights: NDArray[np.float64], lags: NDArray[np.int64]) -> dict[str, float]:
    """That of each lag bucket that has tokens, by its label, in order of lag. Both arrays are [tokens]."""
    buckets = lag_bucket(lags)
    return {LAG_BUCKETS[index]: effective_sample_size(log_weights[buckets == index]) for index in np.unique(buckets)}
