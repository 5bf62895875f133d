"""How many prompt groups may be issued now, in closed form.

The unit is the group. Every optimizer step consumes exactly `groups_per_step = B / n` groups, also when some of their
samples failed; counted in sequences, a failed sample would let one more sequence into flight for good, and the bound
would loosen with every failure. For groups of n the rule is `issued <= (v + 1 + max_lag) * B` divided by n.

Not here: which problem comes next, and the check of each sequence (`lag.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pipelinerl.errors import FieldError


@dataclass(frozen=True)
class FeederBound:
    """The bound of one run.

    **Derivation.** At version v the trainer has consumed `v * K` groups, K = `groups_per_step`. Let N(v) be the groups
    issued and not lost, where a *lost* group is one of which nothing is trained (stale, filtered, all samples failed);
    it is re-issued, so it leaves N. Keep `N(v) <= (v + 1 + max_lag) * K` whenever a group is issued. A group issued at
    version v is then at most number `(v + 1 + max_lag) * K` in order of issue, so a trainer that consumes in that order
    uses it in step `v + max_lag` or before: tokens sampled at v or later have lag <= max_lag when they are used.
    Groups finish out of order, so a long one can be overtaken; the trainer checks every sequence, and an overtaken one
    whose lag grew beyond max_lag is dropped, leaves N and is re-issued: the bound never starves the trainer.
    Tokens may be older than the version of the issue while actors still serve an older one. Pass the oldest version
    that actors serve, rather than the trainer's own, to have the bound hold for them too.

    **Unbounded** (max_lag None, the paper's setting): N(v) <= v * K + `backlog_groups`, so that streams stay bounded;
    by the same argument the lag of an issue-order trainer is then at most `ceil(backlog_groups / K) - 1`. The backlog
    may follow the number of actors. More of it lets more be issued at once; less of it takes nothing back: N(v) stays
    above the limit, and nothing is issued, until steps have consumed the difference, groups that are all in flight.
    What is in flight is at most the backlog that there was when the last of it was issued.

    **Conventional**: phase p covers versions pG .. pG + G - 1 and issues exactly G * K groups (B * G sequences).
    """

    groups_per_step: int
    """B / n."""
    mode: Literal["pipeline", "conventional"] = "pipeline"
    max_lag: int | None = None
    conventional_g: int = 1
    """G, optimizer steps per generation phase."""
    backlog_groups: int = 0
    """Groups issued and not yet consumed, at most, when max_lag is None."""
    total_steps: int | None = None
    """Optimizer steps of the run: nothing is issued that no step would consume. None = no end."""

    def __post_init__(self) -> None:
        if self.groups_per_step < 1:
            raise FieldError("trainer.batch_size", self.groups_per_step, "a step needs at least one group")
        if self.mode == "conventional" and self.max_lag is not None and self.max_lag < self.conventional_g - 1:
            raise FieldError(
                "algorithm.max_lag", self.max_lag, f"conventional mode reaches lag G - 1 = {self.conventional_g - 1}"
            )
        if self.mode == "pipeline" and self.max_lag is None and self.backlog_groups < self.groups_per_step:
            raise FieldError(
                "backlog_groups", self.backlog_groups, f"without max_lag, at least one step's {self.groups_per_step}"
            )

    def limit(self, version: int) -> int:
        """Groups that may have been issued and not lost by the time of `version`, since the start of the run."""
        if self.mode == "conventional":
            limit = (version // self.conventional_g + 1) * self.conventional_g * self.groups_per_step
        elif self.max_lag is None:
            limit = version * self.groups_per_step + self.backlog_groups
        else:
            limit = (version + 1 + self.max_lag) * self.groups_per_step
        return limit if self.total_steps is None else min(limit, self.total_steps * self.groups_per_step)

    def groups_allowed(self, version: int, issued_groups: int, lost_groups: int) -> int:
        """Groups that may be issued now. `issued_groups` counts re-issued ones too; `lost_groups` those they replace."""
        return max(0, self.limit(version) - (issued_groups - lost_groups))

    def starts_phase(self, version: int) -> bool:
        """Whether μ becomes π at `version`: always in pipeline mode, every G steps in conventional mode."""
        return self.mode == "pipeline" or version % self.conventional_g == 0

    def groups_before_step(self, version: int) -> int:
        """Groups that must be complete before the step at `version` starts: conventional mode trains when its whole
        phase is generated (and shuffles it), pipeline mode as soon as one batch is there."""
        if self.mode == "conventional":
            return (self.conventional_g - version % self.conventional_g) * self.groups_per_step
        return self.groups_per_step


def default_backlog(groups_per_step: int, sequences_in_progress: int, group_size: int) -> int:
    """Groups in flight that keep `sequences_in_progress` (H of all actors) generating while one batch is trained and
    one more waits: without max_lag, enough never to idle an actor and small enough to bound the streams."""
    return 2 * groups_per_step + 2 * math.ceil(sequences_in_progress / group_size)
