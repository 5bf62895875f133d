"""Verifier: are completions scored, in time and without errors?"""

from __future__ import annotations

from deploy.dashboards.board import Board, Section
from deploy.dashboards.panels import Panel, Query
from deploy.dashboards.queries import buckets, gauge, increase, mean, quantile, rate

_CALLS = Section(
    "Calls",
    (
        Panel(
            "Calls by code",
            "Calls per second by gRPC status.",
            "OK alone.",
            "RESOURCE_EXHAUSTED: too few verifiers. CANCELLED: callers gave up. INTERNAL: read the log.",
            (Query(rate("verifier_calls_total", "code"), "{{run}} {{code}}"),),
            unit="reqps",
            kind="stacked",
            low=0,
        ),
        Panel(
            "Time of a call",
            "From arrival to answer; a call carries several items.",
            "Near the time of one reward.",
            "Far above it: items wait for workers.",
            (
                Query(quantile(0.5, "verifier_call_seconds"), "{{run}} 50%"),
                Query(quantile(0.95, "verifier_call_seconds"), "{{run}} 95%"),
                Query(quantile(0.99, "verifier_call_seconds"), "{{run}} 99%"),
            ),
            unit="s",
            low=0,
        ),
        Panel(
            "Time of a call, as actors see it",
            "Time of a call, including network and retries.",
            "Close to the verifier's own.",
            "Much longer: network, retries, or a verifier that is away.",
            (Query(mean("actor_verify_seconds"), "{{run}} mean"), Query(quantile(0.95, "actor_verify_seconds"), "{{run}} 95%")),
            unit="s",
            low=0,
        ),
        Panel(
            "Failed attempts, as actors see them",
            "Failed attempts of calls per second, by gRPC status, including those that reached no verifier.",
            "None, or a few RESOURCE_EXHAUSTED.",
            "UNAVAILABLE or DEADLINE_EXCEEDED: no verifier answers; actors retry, and their finished sequences wait.",
            (Query(rate("actor_verify_failed_tries_total", "code"), "{{run}} {{code}}"),),
            unit="reqps",
            kind="stacked",
            low=0,
        ),
        Panel(
            "Items by status",
            "Completions per second, by task and outcome.",
            "ok alone.",
            "timeout, crashed, out_of_memory: the reward function; bad_reference, unknown_task: the problems.",
            (Query(rate("verifier_requests_total", "task", "status"), "{{run}} {{task}} {{status}}"),),
            unit="cps",
            kind="stacked",
            low=0,
        ),
        Panel(
            "Judgements",
            "Judgements per second, by outcome, if another model scores.",
            "answered, and cached if completions are the same.",
            "retried: the judge limits calls or fails; failed: it gave no answer, and the sequences have failed.",
            (Query(rate("verifier_judge_calls_total", "outcome"), "{{run}} {{outcome}}"),),
            unit="cps",
            kind="stacked",
            low=0,
        ),
        Panel(
            "Sequences failed in actors",
            "Failed sequences per second by reason, including those without a verdict.",
            "None.",
            "Any steady rate: docs/errors.md has the reasons.",
            (Query(rate("actor_sequences_failed_total", "reason"), "{{run}} {{reason}}"),),
            unit="cps",
            kind="stacked",
            low=0,
        ),
    ),
)

_WORK = Section(
    "Workers and rewards",
    (
        Panel(
            "Queue",
            "Items that wait for a worker, and their maximum number.",
            "Near 0.",
            "Near its capacity: calls are refused; more verifiers or workers are needed.",
            (
                Query(gauge("verifier_queue_items", of="sum"), "{{run}} waiting"),
                Query(gauge("verifier_queue_capacity_items", of="sum"), "{{run}} capacity"),
            ),
            low=0,
        ),
        Panel(
            "Workers",
            "Worker processes that are up, over all verifiers.",
            "A steady number.",
            "It drops again and again.",
            (Query(gauge("verifier_workers", of="sum")),),
            low=0,
        ),
        Panel(
            "Episodes",
            "Running episodes, and their maximum number.",
            "Below its capacity.",
            "Near its capacity: actors wait for a verifier with room for an episode.",
            (
                Query(gauge("verifier_episodes", of="sum"), "{{run}} under way"),
                Query(gauge("verifier_episode_capacity", of="sum"), "{{run}} capacity"),
            ),
            low=0,
        ),
        Panel(
            "Time of one episode",
            "Time from start to end, including the policy's turns, by task.",
            "Far below task.episode_timeout_s.",
            "Its 95th percentile near it.",
            (
                Query(mean("verifier_episode_seconds", "task"), "{{run}} {{task}} mean"),
                Query(quantile(0.95, "verifier_episode_seconds", "task"), "{{run}} {{task}} 95%"),
            ),
            unit="s",
            low=0,
        ),
        Panel(
            "Workers replaced, deadlines passed",
            "Replaced workers by reason, and rewards and episodes killed at a deadline.",
            "None.",
            "A steady number: a reward function hangs, crashes or grows.",
            (
                Query(increase("verifier_worker_restarts_total", "reason"), "{{run}} {{reason}}"),
                Query(increase("verifier_timeouts_total"), "{{run}} deadlines"),
            ),
            low=0,
        ),
        Panel(
            "Time of one reward",
            "Time in the reward function by task.",
            "Far below its deadline.",
            "Its 95th percentile near the deadline.",
            (
                Query(mean("verifier_reward_seconds", "task"), "{{run}} {{task}} mean"),
                Query(quantile(0.95, "verifier_reward_seconds", "task"), "{{run}} {{task}} 95%"),
            ),
            unit="s",
            low=0,
        ),
        Panel(
            "Rewards",
            "Items scored per second, by reward.",
            "Mass moves from low to high rewards.",
            "All mass in one row: there are no differences to learn from.",
            (Query(buckets("verifier_reward"), "{{le}}"),),
            kind="heatmap",
            width=16,
        ),
    ),
)

VERIFIER = Board(
    "verifier", "Verifier", "Are completions scored, in time and without errors?", (_CALLS, _WORK), several_runs=True
)
