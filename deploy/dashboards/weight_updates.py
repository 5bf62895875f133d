"""Weight updates: do new versions reach the actors, how fast, and at what cost to generation?"""

from __future__ import annotations

from deploy.dashboards.board import Board, Section
from deploy.dashboards.panels import Panel, Query
from deploy.dashboards.queries import (
    actor_gauge,
    actor_mean,
    actor_rate,
    by_actor,
    gauge,
    increase,
    mean,
    quantile,
    rate,
    series,
)

_UPDATES = Section(
    "Updates",
    (
        Panel(
            "Updates by outcome",
            "Versions sent per second: served by all members, or aborted and sent again.",
            "served at the rate of optimizer steps; no aborted.",
            "aborted again and again: members miss weights.deadline_s or fail.",
            (Query(rate("trainer_weight_updates_total", "outcome"), "{{outcome}}"),),
            unit="cps",
            low=0,
        ),
        Panel(
            "Versions not served yet",
            "The trainer's version minus the newest that every member serves.",
            "0 or 1 most of the time; up to algorithm.conventional_g in conventional mode.",
            "It grows: updates do not reach the actors.",
            (Query(f"{gauge('trainer_policy_version')} - {gauge('trainer_served_version')}", "versions"),),
            unit="none",
            low=0,
        ),
        Panel(
            "Round trip",
            "From the announcement of a version until every member serves it.",
            "Shorter than an optimizer step.",
            "Longer than a step: the trainer waits for it (Pipeline, phase send).",
            (
                Query(mean("trainer_weight_update_round_trip_seconds"), "mean"),
                Query(quantile(0.95, "trainer_weight_update_round_trip_seconds"), "95%"),
            ),
            unit="s",
            low=0,
        ),
        Panel(
            "Transfer",
            "Time from the first to the last byte, at the trainer.",
            "Near the model's size over the network's bandwidth.",
            "Far above it, or it jumps: a slow member or a shared network holds up the broadcast.",
            (
                Query(mean("trainer_weight_update_transfer_seconds"), "mean"),
                Query(quantile(0.95, "trainer_weight_update_transfer_seconds"), "95%"),
            ),
            unit="s",
            low=0,
        ),
        Panel(
            "Receive, by actor",
            "Mean time from first to last byte of an update, by actor.",
            "The same for all actors.",
            "One actor's is longer than the others': look at its node.",
            (Query(actor_mean("receive_seconds"), "{{actor}}"),),
            unit="s",
            low=0,
        ),
        Panel(
            "Bytes",
            "Bytes per second: of served versions, counted once for all actors, and received by each actor.",
            "All lines at one height: size of an update times versions served per second.",
            "An actor's line above the trainer's: it receives transfers that are discarded. Below it: it misses versions.",
            (Query(rate("trainer_weight_update_bytes_total"), "sent"), Query(actor_rate("received_bytes_total"), "{{actor}}")),
            unit="Bps",
            low=0,
        ),
    ),
)

_ACTORS = Section(
    "At the actors",
    (
        Panel(
            "Stall, by actor",
            "Mean time without generation in one update.",
            "Milliseconds: weights are received during generation, and only the swap pauses it.",
            "As long as the transfer: the actor pauses for all of it (weight_loader paused).",
            (Query(actor_mean("stall_seconds"), "{{actor}}"),),
            unit="s",
            low=0,
        ),
        Panel(
            "Share of time stalled, by actor",
            "Time without generation because of updates.",
            "Below 2%.",
            "Above 10%: steps are too short for this model and network, or the loader is paused.",
            (Query(actor_rate("stall_seconds_sum"), "{{actor}}"),),
            unit="percentunit",
            low=0,
        ),
        Panel(
            "Actors by staging state",
            "idle, receiving, staged (complete, waiting for commit) or committing (swapping).",
            "Short periods of receiving and staged with each version.",
            "One stays in receiving or staged: its transfer hangs, or the commit does not arrive.",
            (Query(gauge("actor_staging_state", "state", of="sum"), "{{state}}"),),
            kind="stacked",
            low=0,
        ),
        Panel(
            "Updates by outcome, by actor",
            "Per second, as the actors count them.",
            "The same rate for all.",
            "Outcomes other than served at one actor: its log has the reason.",
            (Query(actor_rate("weight_updates_total", "outcome"), "{{actor}} {{outcome}}"),),
            unit="cps",
            low=0,
        ),
        Panel(
            "Way of loading",
            "The way in which each actor loads new weights.",
            "shadow or in_place.",
            "paused: this model cannot be loaded during generation, so each update stalls for the whole load.",
            (Query(f"{actor_gauge('weight_loader', 'mode')} == 1", "{{actor}}: {{mode}}"),),
            kind="name",
        ),
        Panel(
            "Parity",
            "Largest difference of log-probabilities between actors and trainer on a fixed probe; failed answers.",
            "At the rounding of the dtype: about 1e-5 in float32, 1e-2 in bfloat16; no failures.",
            "It grows: actors serve another policy than the trained one.",
            (
                Query(gauge("trainer_logprob_mismatch_nats"), "difference, nats"),
                Query(increase("trainer_parity_failures_total"), "failures"),
            ),
            low=0,
        ),
    ),
)

_MEMBERSHIP = Section(
    "Membership",
    (
        Panel(
            "Members by state",
            "Actors that the trainer knows.",
            "All serving; joining for a short time.",
            "joining for minutes, or serving at 0.",
            (Query(gauge("trainer_members", "state"), "{{state}}"),),
            kind="stacked",
            low=0,
        ),
        Panel(
            "Epoch and regroups",
            "Number of the epoch, and regroupings.",
            "Flat while no actor joins or leaves.",
            "It climbs by itself: members are lost and return.",
            (Query(gauge("trainer_epoch"), "epoch"), Query(increase("trainer_regroups_total"), "regroups")),
            unit="none",
            low=0,
        ),
        Panel(
            "Joins and evictions",
            "Actors that joined through a side group, and evicted actors by reason.",
            "Joins when actors start; no evictions.",
            "Evictions again and again: raise weights.deadline_s for a large model, else look at the actor's log.",
            (
                Query(increase("trainer_joins_total"), "joins"),
                Query(increase("trainer_evictions_total", "reason"), "evicted: {{reason}}"),
            ),
            low=0,
        ),
        Panel(
            "Time to join",
            "Time to bring one actor to the served version in a side group.",
            "About one transfer.",
            "Much longer, or near weights.join_timeout_s.",
            (Query(mean("trainer_join_seconds"), "mean"),),
            unit="s",
            low=0,
        ),
        Panel(
            "Actors that take no prompts",
            "Actors that answer and are not ready: loading, joining, too far behind, or leaving.",
            "0, except for a short time after an actor's start.",
            "It stays: those actors cost money and do nothing.",
            (
                Query(f"count by (namespace, run) ({series('actor_ready')} == 0) or 0 * {gauge('actor_ready')}", "not ready"),
                Query(by_actor(series("actor_ready"), "min"), "{{actor}} ready"),
            ),
            low=0,
        ),
        Panel(
            "Messages set aside",
            "Messages that could not be read or did not fit.",
            "0.",
            "Any: services of different versions, or another run on the same subjects.",
            (
                Query(gauge("trainer_bad_messages"), "trainer"),
                Query(actor_rate("bad_messages_total", "kind"), "{{actor}} {{kind}} per second"),
            ),
            low=0,
        ),
    ),
)

WEIGHT_UPDATES = Board(
    "weight_updates",
    "Weight updates",
    "Do new versions reach the actors, how fast, and at what cost to generation?",
    (_UPDATES, _ACTORS, _MEMBERSHIP),
)
