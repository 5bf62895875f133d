"""Freshness: how old is what is trained on, and what does it cost?"""

from __future__ import annotations

from deploy.dashboards.board import Board, Section
from deploy.dashboards.panels import Panel, Query
from deploy.dashboards.queries import actor_gauge, buckets, gauge, mean, quantile, rate

_DROPPED = 'outcome=~"dropped_.*|failed"'

LAG_HEATMAP = Panel(
    "Token lag",
    "Tokens trained per second, by the number of optimizer steps between sampling and training.",
    "A narrow band near the bottom that does not move.",
    "The band climbs: completions take more steps, or weights arrive late. At max_lag long sequences are dropped.",
    (Query(buckets("trainer_token_lag_steps"), "{{le}}"),),
    kind="heatmap",
    width=24,
    height=9,
)

_LAG = Section(
    "How old",
    (
        LAG_HEATMAP,
        Panel(
            "Lag against its bound",
            "Mean, 95th percentile and maximum of the token lag, and algorithm.max_lag if it is set.",
            "The mean well below the bound.",
            "The mean near the bound: completions take many steps, and long ones are dropped. The maximum over it: a defect.",
            (
                Query(mean("trainer_token_lag_steps"), "mean"),
                Query(quantile(0.95, "trainer_token_lag_steps"), "95%"),
                Query(gauge("trainer_token_lag_max_steps"), "maximum"),
                Query(gauge("trainer_token_lag_bound_steps"), "bound"),
            ),
            unit="none",
            low=0,
            width=12,
        ),
        Panel(
            "Version served, by actor",
            "Each actor's version, the newest one that all members serve, the trainer's, and that of a weight log.",
            "All lines climb together.",
            "An actor's line is flat while the others climb: it is stuck on an old version.",
            (
                Query(gauge("trainer_policy_version"), "trainer"),
                Query(gauge("trainer_served_version"), "served by all members"),
                Query(actor_gauge("policy_version"), "{{actor}}"),
                Query(gauge("trainer_weight_log_version"), "announced in the weight log"),
            ),
            unit="none",
            width=12,
        ),
        Panel(
            "Versions behind, by actor",
            "The trainer's version minus the actor's, at the time of the scrape.",
            "0 or 1; a few more, up and down, if steps are shorter than the scrape interval.",
            "It grows steadily for one actor (stuck) or for all (weight updates fail).",
            (
                Query(
                    f"{gauge('trainer_policy_version')} - on (namespace, run) group_right () {actor_gauge('policy_version')}",
                    "{{actor}}",
                ),
            ),
            unit="none",
        ),
        Panel(
            "Sequences of several versions",
            "Share of the step's sequences whose tokens were sampled by more than one version.",
            "Steady, because of in-flight updates; 0 in conventional mode.",
            "Near 1 with high lag: sequences take longer than several steps.",
            (Query(gauge("trainer_multi_version_ratio")),),
            unit="percentunit",
            low=0,
            high=1,
        ),
        Panel(
            "Tokens not trained on",
            "Completion tokens per second that were dropped or failed, by outcome.",
            "None, or only dropped_filtered if algorithm.filter_equal_rewards is on.",
            "dropped_stale: tokens were too old. Use fewer actors, or a larger algorithm.max_lag.",
            (Query(rate("trainer_tokens_total", "outcome", matchers=_DROPPED), "{{outcome}}"),),
            kind="stacked",
            low=0,
        ),
    ),
)

_COST = Section(
    "What age costs",
    (
        Panel(
            "ESS ratio",
            "Effective sample size over the number of tokens, with unclamped importance weights.",
            "Above 0.9.",
            "Below 0.5, or falling step by step: few tokens dominate each update.",
            (Query(gauge("trainer_ess_ratio"), "all tokens"),),
            unit="percentunit",
            low=0,
            high=1,
        ),
        Panel(
            "ESS ratio by lag",
            "The same within each bucket of token lag (optimizer steps).",
            "It falls gently with lag.",
            "Low at lag 0: actors and trainer do not match. Low only at high lag: lower algorithm.max_lag.",
            (Query(gauge("trainer_ess_by_lag_ratio", "lag"), "lag {{lag}}"),),
            unit="percentunit",
            low=0,
            high=1,
        ),
        Panel(
            "Clipped tokens by lag",
            "Share of tokens whose weight the loss bounded, within each bucket of token lag.",
            "Near 0 at low lag.",
            "Several percent: the loss discards the gradient of those tokens.",
            (Query(gauge("trainer_clip_by_lag_ratio", "lag"), "lag {{lag}}"), Query(gauge("trainer_clip_ratio"), "all tokens")),
            unit="percentunit",
            low=0,
        ),
    ),
)

FRESHNESS = Board("freshness", "Freshness", "How old is the training data, and what does its age cost?", (_LAG, _COST))
