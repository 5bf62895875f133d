"""A real run, scraped by a real Prometheus: every query of every panel and of every alert finds what it asks for.

One run for all: two actors, of which one is killed and comes back. Its services are scraped twice, as a local Prometheus and as
one in a cluster would, which puts `namespace` and `pod` on every series.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.prometheus_server import Prometheus, prometheus_server, run_targets
from deploy.dashboards.all import BOARDS
from deploy.dashboards.board import Board
from tests.chart.rendering import NAMESPACE
from tests.e2e.conftest import RUN_TIMEOUT_S, RunningCommand, started_run, tiny_recipe
from tests.monitoring.catalogue import names_in
from tests.monitoring.chart_rules import shown_alerts, write_rules
from tests.support.tools import tool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

WINDOW = "10s"
"""For the windows that Grafana fills in: some scrapes."""
WITHOUT = {
    "pipelinerl_trainer_mfu_ratio": "no CPU's peak is known",
    "pipelinerl_trainer_value_loss": "only with algorithm.advantage: value",
    "pipelinerl_trainer_explained_variance_ratio": "only with algorithm.advantage: value",
    "pipelinerl_trainer_reference_kl_nats": "only with algorithm.kl_coefficient",
    "pipelinerl_trainer_rank_orders_total": "only of a trainer's second and further nodes",
}
"""Metrics of which a healthy run on a CPU has no series, and why."""
LATE = {
    "pipelinerl_actor_replicas_wanted": "known when actors were measured for a minute",
    "pipelinerl_trainer_failed_sequences": "a reason is there from its first sequence on",
    "pipelinerl_trainer_dropped_stale_sequences": "a reason is there from its first sequence on",
    "pipelinerl_actor_sequences_failed_total": "a reason is there from its first sequence on",
}
"""Metrics of which a short run may have none, and why."""


@dataclass(frozen=True)
class Scraped:
    """What Prometheus took from a run between two times, Unix seconds."""

    server: Prometheus
    start_s: float
    end_s: float

    def finds(self, expression: str) -> bool:
        return bool(self.server.query_range(expression, self.start_s, self.end_s, 1.0))


def scrape_configs(targets: dict[str, object]) -> list[object]:
    """Every service once as it is, and once as a pod."""
    as_pods = [
        {"source_labels": ["service"], "regex": "runner", "action": "drop"},
        {"target_label": "namespace", "replacement": NAMESPACE},
        {"source_labels": ["instance"], "target_label": "pod", "replacement": "pipelinerl-$1"},
        {
            "source_labels": ["service"],
            "regex": "(trainer|verifier)",
            "target_label": "pod",
            "replacement": "pipelinerl-$1-0",
        },
    ]
    return [{"job_name": "local", **targets}, {"job_name": "cluster", **targets, "relabel_configs": as_pods}]


def wait_until(expression: str, server: Prometheus, run: RunningCommand) -> None:
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    while not server.query(expression):
        assert run.process.poll() is None, run.output.read_text()
        assert time.monotonic() < deadline_s, f"never true: {expression}\n{run.output.read_text()}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def scraped(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    program, folder = tool("prometheus"), tmp_path_factory.mktemp("scraped")
    recipe, rules = tiny_recipe(tiny_model, folder), write_rules(folder / "rules.yaml")
    start_s = time.time()
    with started_run(recipe, folder / "run", "--actors", "2", "--set", "trainer.steps=100000") as run:
        targets = run_targets(folder / "run", run.process)
        with prometheus_server(program, folder, scrape_configs(targets), rules=[rules]) as server:
            both = 'max(pipelinerl_trainer_members{state="serving"}) == 2'
            wait_until(f"{both} and max(pipelinerl_trainer_policy_version) > 5", server, run)
            os.kill(run.pids()["actor-1"], signal.SIGKILL)
            wait_until("sum(pipelinerl_trainer_evictions_total) > 0", server, run)
            wait_until(f"{both} and max(pipelinerl_trainer_join_seconds_count) > 0", server, run)
            wait_until("count(pipelinerl_actor_ready == 1) == 4", server, run)  # each is scraped twice
            wait_until("count(rate(pipelinerl_actor_stall_seconds_count[5s]) > 0) == 4", server, run)
            os.killpg(run.process.pid, signal.SIGINT)
            assert run.process.wait(30) == 130
            yield Scraped(server, start_s, time.time())


def windowed(query: str) -> str:
    return re.sub(r"\$(window|__rate_interval|__range)\b", WINDOW, query)


def has_none(query: str, namespace: str) -> bool:
    return bool(names_in(query) & WITHOUT.keys()) or (namespace != "" and "pipelinerl_runner_" in query)


@pytest.mark.parametrize("namespace", ["", NAMESPACE], ids=["local", "cluster"])
@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_query_of_every_panel_finds_data(scraped: Scraped, board: Board, namespace: str) -> None:
    """An empty pattern takes only series without the label, as those of a local Prometheus are."""
    empty = []
    for panel in board.panels:
        for query in panel.queries:
            chosen = query.expr.replace("$namespace", namespace).replace("$run", ".+")
            found = scraped.finds(windowed(chosen))
            if found == has_none(query.expr, namespace) and not names_in(query.expr) & LATE.keys():
                empty.append(f"{panel.title}: {query.expr} ({'data' if found else 'nothing'})")
    assert empty == []


def test_no_label_of_ours_gives_way_to_one_of_the_target(scraped: Scraped) -> None:
    """Prometheus calls ours `exported_…` where both have the name, and no query would find it."""
    series = scraped.server.query_range('{__name__=~"pipelinerl_.+"}', scraped.end_s - 5, scraped.end_s, 1.0)
    names = {label for one in series for label in one["metric"]}
    assert {"run", "service", "instance", "process"} <= names
    assert [name for name in names if name.startswith("exported_")] == []


def test_every_alert_looks_at_series_that_are_there(scraped: Scraped) -> None:
    missing = []
    for name, rule in shown_alerts().items():
        scraped.finds(rule["expr"])  # raises when Prometheus refuses it
        for selector in re.findall(r"\w+\{.*?\}", rule["expr"]):
            well_or_not = re.sub(r', \w+!=".*?"', "", selector)  # what went wrong has series when it first does
            if not scraped.finds(well_or_not):
                missing.append(f"{name}: {selector}")
    assert missing == []


def test_no_alert_fires_in_a_run_that_is_well(scraped: Scraped) -> None:
    rules = scraped.server.rules()
    assert {rule["name"] for rule in rules} == set(shown_alerts())
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    fired = scraped.server.query_range('ALERTS{alertstate="firing"}', scraped.start_s, scraped.end_s, 1.0)
    assert [series["metric"]["alertname"] for series in fired] == []


def test_what_actors_are_called_is_their_pod_or_their_instance(scraped: Scraped) -> None:
    (query,) = [
        query
        for board in BOARDS
        for panel in board.panels
        if panel.title == "Stall, by actor"
        for query in panel.queries
    ]
    stalls = windowed(query.expr.replace("$run", ".+"))
    pods = scraped.server.query_range(stalls.replace("$namespace", NAMESPACE), scraped.start_s, scraped.end_s, 1.0)
    assert {series["metric"]["actor"] for series in pods} == {"pipelinerl-actor-0", "pipelinerl-actor-1"}
    local = scraped.server.query_range(stalls.replace("$namespace", ""), scraped.start_s, scraped.end_s, 1.0)
    assert {series["metric"]["actor"] for series in local} == {"actor-0", "actor-1"}
