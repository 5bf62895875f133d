"""Run: is the policy learning, and is the optimization stable?"""

from __future__ import annotations

from deploy.dashboards.board import Board, Section
from deploy.dashboards.panels import Panel, Query
from deploy.dashboards.queries import gauge, increase, mean, quantile, rate, series

_LEARNING = Section(
    "Is it learning",
    (
        Panel(
            "Phase",
            "What the trainer does now.",
            "waiting_for_sequences or training, in turn; finished at the end.",
            "waiting_for_actors for longer than actors take to load the model.",
            (Query(f"max by (namespace, run, phase) ({series('trainer_phase')}) == 1", "{{run}}: {{phase}}"),),
            kind="name",
            width=6,
            height=4,
        ),
        Panel(
            "Optimizer steps",
            "Policy version, and how many steps are planned.",
            "The first number moves towards the second.",
            "It stands still while the phase is not finished.",
            (
                Query(gauge("trainer_policy_version"), "{{run}} taken"),
                Query(gauge("trainer_planned_steps"), "{{run}} planned"),
            ),
            unit="none",
            kind="number",
            width=6,
            height=4,
        ),
        Panel(
            "ESS ratio, now",
            "Effective sample size over the tokens of the last step; 1 is on-policy.",
            "Above 0.9.",
            "Below 0.5: half of the batch counts for nothing. See the Freshness dashboard.",
            (Query(gauge("trainer_ess_ratio")),),
            unit="percentunit",
            kind="number",
            width=4,
            height=4,
        ),
        Panel(
            "Unaccounted sequences",
            "Sequences issued that are in no state of the ledger.",
            "0.",
            "Anything else: a defect that loses or repeats data.",
            (Query(gauge("trainer_ledger_discrepancy_sequences")),),
            unit="none",
            kind="number",
            width=4,
            height=4,
        ),
        Panel(
            "Checkpoint age",
            "Time since the newest checkpoint, or since training began: what a lost trainer would have to do again.",
            "Below the interval that the recipe asks for, plus writing time.",
            "It grows past that: writing fails, or steps take much longer than planned.",
            (Query(f"time() - {gauge('trainer_checkpoint_timestamp_seconds')}"),),
            unit="s",
            kind="number",
            width=4,
            height=4,
        ),
        Panel(
            "Reward",
            "Mean reward of the sequences of a step, and their standard deviation.",
            "The mean rises, steeply at first.",
            "It falls, or stays flat from the start; a spread near 0 leaves nothing to learn from.",
            (Query(gauge("trainer_reward_mean"), "{{run}} mean"), Query(gauge("trainer_reward_std"), "{{run}} std")),
            width=12,
        ),
        Panel(
            "Held-out accuracy",
            "Share of held-out problems that the policy answers right, by evaluations.",
            "It follows the reward upwards.",
            "Reward rises and this does not: the reward is being exploited, or the training problems are learned by heart.",
            (Query(gauge("trainer_heldout_accuracy_ratio")),),
            unit="percentunit",
            width=12,
            low=0,
            high=1,
        ),
        Panel(
            "Spread inside groups",
            "Mean over a step's groups of the rewards' standard deviation inside the group: the signal of group baselines.",
            "Well above 0 until the task is mastered.",
            "Near 0: all samples of a prompt do equally well or badly, so advantages vanish.",
            (Query(gauge("trainer_group_reward_std")),),
            low=0,
        ),
        Panel(
            "Groups with equal rewards",
            "Share of a step's groups whose rewards are all equal: they teach nothing.",
            "Low; it rises towards the end, when most problems are solved.",
            "Above one half early on: the problems are too hard or too easy for this policy.",
            (Query(gauge("trainer_equal_reward_groups_ratio")),),
            unit="percentunit",
            low=0,
            high=1,
        ),
        Panel(
            "Held-out problems without verdict",
            "Problems of the last evaluation that got no answer or no verdict in time.",
            "0.",
            "Many: the accuracy is of a part of the problems. Actors left during it, or the verifier fails.",
            (Query(gauge("trainer_heldout_unanswered_problems")),),
            low=0,
        ),
    ),
)

_STABLE = Section(
    "Is it stable",
    (
        Panel(
            "Loss",
            "Loss of the whole batch, normalised as the recipe says. Policy-gradient losses need not fall.",
            "Noise around a level of its own.",
            "Jumps of orders of magnitude, or gaps where it is not finite.",
            (Query(gauge("trainer_loss")),),
        ),
        Panel(
            "Entropy",
            "Mean entropy of the token distributions.",
            "It falls slowly.",
            "It drops to near 0 within few steps (the policy collapses) or rises steadily (it falls apart).",
            (Query(gauge("trainer_entropy_nats")),),
            unit="nats",
            low=0,
        ),
        Panel(
            "KL divergence",
            "Between trainer and actors on tokens of lag 0 (mismatch), and to the reference policy where the recipe has one.",
            "Mismatch at the dtype's rounding; the reference's KL grows slowly.",
            "Mismatch grows: actors and trainer compute different policies. See Weight updates, parity.",
            (
                Query(gauge("trainer_mismatch_kl_nats"), "{{run}} mismatch, lag 0"),
                Query(gauge("trainer_reference_kl_nats"), "{{run}} to the reference"),
            ),
            unit="nats",
        ),
        Panel(
            "Gradient norm",
            "Before clipping.",
            "A steady level, mostly below trainer.max_grad_norm.",
            "Spikes that come more and more often: learning rate too high, or data too old.",
            (Query(gauge("trainer_gradient_norm")),),
            low=0,
        ),
        Panel(
            "Learning rate",
            "Of the last step.",
            "The schedule of the recipe.",
            "Another course than the recipe's.",
            (Query(gauge("trainer_learning_rate")),),
            low=0,
            unit="sci",
        ),
        Panel(
            "Clipped and masked tokens",
            "Share of tokens whose weight the loss bounded, and share that a mask left out.",
            "Below one percent clipped with the default loss.",
            "Rising: the data gets old, see the Freshness dashboard.",
            (
                Query(gauge("trainer_clip_ratio"), "{{run}} clipped"),
                Query(gauge("trainer_mask_ratio"), "{{run}} masked"),
            ),
            unit="percentunit",
            low=0,
        ),
        Panel(
            "Steps skipped",
            "Optimizer steps that changed no weight, because loss or gradient was not finite.",
            "None.",
            "Any; after trainer.max_skipped_steps in a row the run ends.",
            (Query(increase("trainer_steps_skipped_total")),),
            low=0,
        ),
        Panel(
            "Learned baseline",
            "Loss of the value head, and share of the reward's variance explained. Only with algorithm.advantage: value.",
            "The explained share rises towards 1.",
            "It stays below 0: worse than a constant.",
            (
                Query(gauge("trainer_value_loss"), "{{run}} loss"),
                Query(gauge("trainer_explained_variance_ratio"), "{{run}} explained"),
            ),
        ),
    ),
)

_DATA = Section(
    "What it learns from",
    (
        Panel(
            "Completion length",
            "Mean of the sequences that were trained on, and 95th percentile of what actors finish.",
            "Stable, or growing with the reward.",
            "At sampling.max_tokens (answers are cut off), or collapsing to a few tokens.",
            (
                Query(gauge("trainer_completion_length_tokens"), "{{run}} trained, mean"),
                Query(mean("actor_completion_tokens"), "{{run}} finished, mean"),
                Query(quantile(0.95, "actor_completion_tokens"), "{{run}} finished, 95%"),
            ),
            low=0,
        ),
        Panel(
            "Sequences finished, by reason",
            "Completions per second, by why they ended.",
            "Mostly stop.",
            "Mostly length: raise sampling.max_tokens, or look at samples for endless repetition.",
            (Query(rate("actor_sequences_finished_total", "reason"), "{{run}} {{reason}}"),),
            unit="cps",
            kind="stacked",
            low=0,
        ),
        Panel(
            "Sequences by state",
            "The ledger: every issued sequence is in exactly one state.",
            "trained grows; in_flight stays bounded.",
            "failed or dropped grow as fast as trained.",
            (Query(gauge("trainer_ledger_sequences", "state"), "{{run}} {{state}}"),),
            unit="locale",
            low=0,
        ),
        Panel(
            "Sequences lost, by reason",
            "Sequences that failed and that were dropped as too old, since the run began.",
            "None, or a few after an actor was lost.",
            "A reason that grows all the time: docs/errors.md says what it means.",
            (
                Query(gauge("trainer_failed_sequences", "reason"), "{{run}} failed: {{reason}}"),
                Query(gauge("trainer_dropped_stale_sequences", "reason"), "{{run}} too old: {{reason}}"),
            ),
            unit="locale",
            low=0,
        ),
    ),
)

RUN = Board(
    "run",
    "Run",
    "Is the policy learning, and is the optimization stable?",
    (_LEARNING, _STABLE, _DATA),
    several_runs=True,
)
