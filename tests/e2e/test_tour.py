"""The grand tour: one run with real services and vLLM engines, watched while it trains, hit, stopped and resumed.

Each fixture below plays one phase and keeps what it saw; the tests after it look at that. In order:

- `tour`: two actors train; a Prometheus scrapes all services, a collector takes the traces, a browser shows the live page
- `calm`: every trained sequence and every weight update is one connected trace; the page is live, readable on a phone, usable
  by keyboard, and shows the numbers of /metrics; no alert is pending
- `trainer_killed`: the trainer goes on from its checkpoint, at the same address; the page follows
- `actor_killed`: an engine dies in the middle of a weight update; the others go on, it comes back
- `scaled`: an actor leaves in order
- `stopped`: Ctrl-C ends everything in order, with a report, a checkpoint and a clean audit; every dashboard found data
- `resumed`: the run goes on to its end, with the one actor

The last tests run what `pipelinerl init` writes, and the notebook in examples.

A learned baseline is on, so that its metrics and its part of the checkpoint are there too. A new feature adds assertions here
and no run of its own.
"""

import ast
import asyncio
import functools
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import nbformat
import pytest
import pytest_asyncio
import yaml
from nbclient import NotebookClient
from playwright.async_api import Browser
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.prometheus_server import Prometheus, prometheus_server, run_targets
from deploy.dashboards.all import BOARDS
from deploy.dashboards.board import Board
from pipelinerl.api import Run
from pipelinerl.run_dir import RunDir, policies_of
from pipelinerl.service.settings import read_address
from tests.chart.rendering import NAMESPACE
from tests.faults.slow import talks
from tests.monitoring.catalogue import groups, names_in, samples, shown_alerts
from tests.support import stranger
from tests.support.browser import OpenPage, barriers, chromium, opened, too_wide
from tests.support.collector import Collector, collecting
from tests.support.machine import free_port
from tests.support.runs import (
    PARITY_NATS,
    PROGRAM,
    RUN_TIMEOUT_S,
    RunningCommand,
    audit,
    ledger_adds_up,
    pipelinerl,
    settings,
    started_run,
    write_tiny_recipe,
)
from tests.support.terminal import terminal
from tests.support.tools import tool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]
phase = functools.partial(pytest_asyncio.fixture, scope="module", loop_scope="module")

ROOT = Path(__file__).resolve().parents[2]
CALM_STEPS = 6
VICTIM = "actor-1"
TASKS = (
    {"name": "sums", "weight": 2},
    {
        "name": "short-sums",
        "max_tokens": 16,
        "task": {"config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, "heldout_problems": 8},
        "reward": {"scorer": "task"},
    },
    talks(reply_s=0.2),
)
"""Two groups of the first, one of the second, one of the third, which are episodes, and so on."""
WINDOW = "10s"
"""For the windows that Grafana fills in: some scrapes."""
ABSENT = {
    "pipelinerl_trainer_mfu_ratio": "no CPU's peak is known",
    "pipelinerl_trainer_reference_kl_nats": "only with algorithm.kl_coefficient",
    "pipelinerl_trainer_rank_orders_total": "only of a trainer's second and further nodes",
    "pipelinerl_trainer_weight_log_version": "only with weights.log",
}
"""Metrics without a series in this run, and why."""
MAYBE = {
    "pipelinerl_actor_replicas_wanted": "known when actors were measured for a minute",
    "pipelinerl_trainer_mismatch_kl_nats": "a step may have no token of lag 0",
    "pipelinerl_trainer_checkpoint_upload_waiting_seconds": "only while one waits",
    "pipelinerl_trainer_failed_sequences": "a reason is there from its first sequence on",
    "pipelinerl_trainer_dropped_stale_sequences": "a reason is there from its first sequence on",
    "pipelinerl_actor_sequences_failed_total": "a reason is there from its first sequence on",
}
"""Metrics that may have none, and why."""
OF_SPEED = {
    "PipelineRLActorsStarved",
    "PipelineRLESSLow",
    "PipelineRLLagNearBound",
    "PipelineRLSequencesTooOld",
    "PipelineRLTrainerStarved",
}
"""Alerts about how fast actors and trainer are, and how fast a policy changes: without their `for`, random
weights may fire them."""
PHONE = {"width": 360, "height": 740}


@dataclass
class Tour:
    """The run and its observers. Times are Unix seconds."""

    run: RunningCommand
    collector: Collector
    prometheus: Prometheus
    browser: Browser
    start_s: float
    url: str
    """Of the live page."""
    temporary: Path
    """Folder for temporary files."""


@phase()
async def tour(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tour]:
    prometheus_program, _ = tool("prometheus"), tool("chromium")  # before anything starts: a missing one skips the tour
    folder = tmp_path_factory.mktemp("tour")
    changes = {
        "actor": {"count": 2},
        "reward": {"scorer": "tests.faults.slow:score_slowly", "answer_pattern": ""},
        "algorithm": {"advantage": "value"},
        "trainer": {"steps": 100_000},
        "evaluation": {"every_steps": 0, "samples": 2, "temperature": 1.0},
        "checkpoint": {"every_steps": 8, "upload": f"file://{folder}/store"},
        "weights": {"deadline_s": 15, "probe_every": 4},
    }
    recipe = write_tiny_recipe(tiny_model, folder, changes, tasks=TASKS)
    at_once = [  # the alerts' conditions themselves: nothing in a short run lasts as long as their `for`
        {**group, "rules": [{key: value for key, value in rule.items() if key != "for"} for rule in group["rules"]]}
        for group in groups()
    ]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": at_once}), encoding="utf-8")
    start_s = time.time()
    async with AsyncExitStack() as stack:
        collector = stack.enter_context(collecting())
        temporary = Path(str(folder / "t").ljust(57, "t"))  # vLLM's sockets below a longer one would have too long a path
        temporary.mkdir()
        environment = {
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(temporary),
            # The whole URL, so that vLLM's workers would begin to trace by themselves if they saw it.
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/v1/traces",
            "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "300",  # so that no span is lost while the collector stands still
            "OTEL_BSP_MAX_QUEUE_SIZE": "100000",
        }
        port = ("--page-port", str(free_port()))
        run = stack.enter_context(started_run(recipe, folder / "run", *port, environment=environment))
        targets = await asyncio.to_thread(run_targets, run.run_dir, run.process)
        scraping = prometheus_server(prometheus_program, folder, scrape_configs(targets), rules=[folder / "rules.yaml"])
        prometheus = stack.enter_context(scraping)
        browser = await stack.enter_async_context(chromium())
        await run.until_step(CALM_STEPS)
        await run.until(lambda: any("talks" in record["tasks"] for record in run.metrics()), "a step with episodes")
        link = re.search(r"^Live page: (http://127\.0\.0\.1:[0-9]+/[\w-]+/)$", run.said, re.MULTILINE)
        assert link is not None, run.said
        stays = stranger.another_user(RunDir(run.run_dir, ""), ["actor", "engine", "trainer"])
        await asyncio.to_thread(stack.enter_context, stays)  # to the end, whatever happens to the run
        yield Tour(run, collector, prometheus, browser, start_s, link[1], temporary)


def scrape_configs(targets: dict[str, object]) -> list[object]:
    """Every service as a local Prometheus scrapes it, and once more as one in a cluster does: with `namespace` and `pod`."""
    as_pods = [
        {"source_labels": ["service"], "regex": "runner", "action": "drop"},
        {"target_label": "namespace", "replacement": NAMESPACE},
        {"source_labels": ["instance"], "target_label": "pod", "replacement": "pipelinerl-$1"},
        {"source_labels": ["service"], "regex": "(trainer|verifier)", "target_label": "pod", "replacement": "pipelinerl-$1-0"},
    ]
    return [{"job_name": "local", **targets}, {"job_name": "cluster", **targets, "relabel_configs": as_pods}]


# Traces of the first steps


@dataclass
class Calm:
    """The first steps of a healthy run: their records, and all spans that belong to them."""

    records: list[dict[str, Any]]
    spans: Collector
    start_s: float
    end_s: float


@phase()
async def calm(tour: Tour) -> Calm:
    records, start_s = tour.run.metrics(), time.time()
    calm = Calm(records, Collector(), start_s, start_s)

    def later_ones() -> bool:
        calm.spans.spans = list(tour.collector.spans)
        updates = calm.spans.named("weight_update")
        return any(span.attributes["pipelinerl.policy.version"] > len(records) + 2 for span in updates)

    def all_there() -> bool:
        """The spans of these steps have left every process, since each exports its spans in the order of their ends."""
        calm.spans.spans = list(tour.collector.spans)
        return len({(span.service, span.instance) for span in calm.spans.spans if span.end_s > since_s}) >= 4

    await tour.run.until(later_ones, "spans of later steps arrive")
    since_s = time.time()
    await tour.run.until(all_there, "all processes export further spans")
    calm.spans.headers = list(tour.collector.headers)
    calm.end_s = time.time()
    return calm


async def test_spans_come_from_all_services_and_name_the_run(calm: Calm) -> None:
    assert {span.service for span in calm.spans.spans} == {"pipelinerl-trainer", "pipelinerl-actor", "pipelinerl-verifier"}
    (name,) = {span.resource["pipelinerl.run"] for span in calm.spans.spans}
    assert name.startswith("tiny-")
    assert {headers["authorization"] for headers in calm.spans.headers} == {"secret"}


async def test_every_trained_sequence_is_one_trace_over_feeder_actor_verifier_and_trainer(calm: Calm) -> None:
    version = "pipelinerl.policy.version"
    last = len(calm.records)
    steps = {span.id: span for span in calm.spans.named("step.train") if span.attributes[version] <= last}
    assert sorted(span.attributes[version] for span in steps.values()) == list(range(1, last + 1))
    trained = [span for span in calm.spans.named("sequence.train") if span.attributes[version] <= last]
    assert len(trained) == sum(record["sequences_trained"] for record in calm.records)
    kinds, linked = Counter[bool](), {name for step in steps.values() for name in step.links}
    for end in trained:
        way = calm.spans.way_of(end)
        is_episode = way[1].name == "episode.generate"
        kinds[is_episode] += 1
        assert [(span.name, span.service.removeprefix("pipelinerl-")) for span in way] == [
            ("group.issue", "trainer"),
            ("episode.generate" if is_episode else "sequence.generate", "actor"),
            ("sequence.publish", "actor"),
            ("sequence.receive", "trainer"),
            ("sequence.train", "trainer"),
        ]
        assert len({span.trace for span in way}) == 1
        generated = way[1]
        assert generated.attributes["gen_ai.usage.output_tokens"] > 0
        judged = next(span for span in calm.spans.children(generated) if span.name in ("sequence.verify", "episode.run"))
        if is_episode:
            assert (judged.name, judged.service) == ("episode.run", "pipelinerl-verifier")
        else:
            (answered,) = calm.spans.children(judged)
            (scored,) = calm.spans.children(answered)
            assert [(span.name, span.service.removeprefix("pipelinerl-")) for span in (judged, answered, scored)] == [
                ("sequence.verify", "actor"),
                ("sequence.verify", "verifier"),
                ("reward.score", "verifier"),
            ]
        step = steps[end.links[0]]
        assert step.attributes[version] == end.attributes[version]
        assert way[-2].id in linked
    assert min(kinds[False], kinds[True]) > 0


async def test_the_spans_of_a_weight_update_cover_the_trainer_and_every_actor(calm: Calm) -> None:
    updates = [
        span
        for span in calm.spans.named("weight_update")
        if "pipelinerl.actor" not in span.attributes and span.attributes["pipelinerl.policy.version"] <= len(calm.records)
    ]
    versions = [span.attributes["pipelinerl.policy.version"] for span in updates]
    assert versions[:2] == [0, 1]
    assert versions == sorted(set(versions)), "some may be passed over while version 0 is evaluated"
    for update in updates:
        below = calm.spans.below(update)
        of_trainer = [span.name for span in below if span.service == "pipelinerl-trainer"]
        assert {"weight_update.announce", "weight_update.transfer", "weight_update.commit"} <= set(of_trainer)
        for actor in ("actor-0", "actor-1"):
            of_actor = {span.name for span in below if span.instance == actor}
            assert of_actor == {f"weight_update.{part}" for part in ("receive", "stage", "commit", "load")}
        assert sorted(update.events) == ["serving"] * 2 + ["staged"] * 2
        assert of_trainer.count("weight_update.answer") == 4


async def test_an_evaluation_is_generated_by_both_actors_which_have_it_scored(calm: Calm) -> None:
    first = calm.spans.named("evaluation")[0]
    below = calm.spans.below(first)
    assert {span.instance for span in below if span.name == "evaluation.generate"} == {"trainer", "actor-0", "actor-1"}
    assert {span.instance for span in below if span.name == "sequence.verify"} == {"actor-0", "actor-1", "verifier"}


# The live page


def metric(text: str, name: str, **labels: str) -> float:
    """The trainer's one sample of that name with these labels, whatever others it has."""
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"pipelinerl_trainer_{name}" and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


async def test_the_page_updates_while_the_run_trains_and_asks_nobody_else(tour: Tour, calm: Calm) -> None:
    async with opened(tour.browser, tour.url) as shown:
        version = await shown.version_above(0)
        assert await shown.version_above(version + 1) > version
        assert await shown.page.get_attribute("main", "data-link") == "live"
        await shown.until("() => document.querySelectorAll('figure svg path').length > 8")
        await shown.until("() => document.querySelector('[data-member=actor-0]')?.textContent.includes('serving')")
        assert (await shown.page.inner_text("[data-ledger=trained] td")).replace(",", "").isdigit()
        assert "name: tiny" in (await shown.page.text_content("details pre") or "")
        assert shown.problems == []
        assert all(url.startswith((tour.url, "data:")) for url in shown.requests), shown.requests
        assert sum("page/history" in url for url in shown.requests) == 1, "only what is new is asked for again"


async def test_samples_are_coloured_by_version_and_say_what_a_token_weighs(tour: Tour, calm: Calm) -> None:
    async with opened(tour.browser, tour.url) as shown:
        await shown.until("() => document.querySelectorAll('.tokens .change + .token').length > 0")
        trained, version = list[dict[str, Any]](), -1
        while {"branches" in one for one in trained} != {False, True}:
            version = await shown.version_above(version)
            history = (await shown.page.evaluate("fetch('page/history').then((answer) => answer.json())"))["samples"]
            trained = [one for one in [*history["early"], *history["late"]] if not one["heldout"]]
        for one in trained:
            if "branches" in one:
                (branch,) = one["branches"]
                assert [part["role"] for part in branch["parts"]] == [*["assistant", "observation"] * 2, "assistant"]
                continue
            assert one["completion"].startswith("".join(one["tokens"]))
            assert len(one["tokens"]) == len(one["weights"]) == one["spans"][-1][2]
        text = shown.page.locator(".samples .tokens:has(.token ~ .token)").last
        await text.focus()
        await shown.page.keyboard.press("Home")
        await shown.page.keyboard.press("ArrowRight")
        said = await text.locator("xpath=following-sibling::*").inner_text()
        assert re.fullmatch(r"Token 2: .*, version [0-9]+(, lag [0-9]+)?(, weight w = [0-9.e+-]+)?", said), said
        await text.locator(".token").first.hover()
        assert (await text.locator("xpath=following-sibling::*").inner_text()).startswith("Token 1: ")
        assert shown.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_page_reads_on_a_phone_by_day_and_by_night(tour: Tour, calm: Calm, scheme: str) -> None:
    async with opened(tour.browser, tour.url, viewport=PHONE, color_scheme=scheme, has_touch=True) as shown:
        await shown.version_above(0)
        assert await too_wide(shown.page) == []
        background = await shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
        bright = sum(int(number) for number in re.findall("[0-9]+", background)[:3]) > 384
        assert bright == (scheme == "light")
        await shown.page.locator(".samples .token").first.tap()
        await shown.until("() => [...document.querySelectorAll('.readout')].some((e) => e.textContent.startsWith('Token 1: '))")
        assert shown.problems == []


async def test_everything_on_the_page_can_be_reached_and_named_without_a_mouse(tour: Tour, calm: Calm) -> None:
    async with opened(tour.browser, tour.url) as shown:
        await shown.version_above(0)
        nameless = """() => [...document.querySelectorAll('a, input, summary, progress, [tabindex], [role=img]')]
            .filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.[0]?.textContent.trim()))
            .map((e) => e.outerHTML.slice(0, 80))"""
        assert await shown.page.evaluate(nameless) == []
        levels = await shown.page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((e) => Number(e.tagName[1]))")
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        kinds, outlines = [], set()
        for _ in range(14):
            await shown.page.keyboard.press("Tab")
            focus = "[document.activeElement.tagName, getComputedStyle(document.activeElement).outlineStyle]"
            kind, outline = await shown.page.evaluate(focus)
            kinds.append(kind.lower())
            outlines.add(outline)
        assert kinds[:9] == ["a"] * 7 + ["input", "svg"], kinds
        assert outlines == {"solid"}, "focus is seen"
        chart = shown.page.locator("figure:has(.title:text-is('Train reward')) svg")
        await chart.focus()
        await shown.page.keyboard.press("Home")
        tip = shown.page.locator("figure:has(.title:text-is('Train reward')) .tip")
        assert (await tip.inner_text()).splitlines()[0] == "step 1"
        version = int(await shown.tile("version"))
        await shown.version_above(version + 1)
        still = (await tip.inner_text()).splitlines()[0]
        assert still == "step 1", "drawn again under the reader's eyes, it keeps what was read"
        assert await shown.page.evaluate("document.activeElement.tagName") == "svg"


async def shown_and_measured(shown: OpenPage, client: httpx.AsyncClient) -> tuple[dict[str, float], str]:
    """Tiles of the page and /metrics, both of one version. A step between them, of sequences that were on their way when the
    verifier was held, has them read again."""
    while True:
        text = (await client.get("metrics")).text
        version, trained = int(metric(text, "policy_version")), int(metric(text, "ledger_sequences", state="trained"))
        await shown.until(
            """([version, trained]) => {
                const text = (selector) => document.querySelector(selector).textContent;
                const now = Number(text('[data-tile=version] .value'));
                return now > version || now === version && text('[data-ledger=trained] td') === trained
                    && text('[data-tile=reward] .note').startsWith(`step ${version};`);
            }""",
            [version, f"{trained:,}"],
        )
        tiles = {name: float(await shown.tile(name)) for name in ("reward", "ess", "parity", "version")}
        text = (await client.get("metrics")).text
        if tiles["version"] == version == metric(text, "policy_version"):
            return tiles, text


async def test_the_page_shows_the_numbers_of_metrics(tour: Tour, calm: Calm) -> None:
    """While the verifier is held, so that the trainer uses up what there is."""
    verifier = tour.run.pids()["verifier"]
    async with opened(tour.browser, tour.url) as shown, httpx.AsyncClient(base_url=tour.url, trust_env=False) as client:
        await shown.version_above(0)
        os.killpg(verifier, signal.SIGSTOP)
        try:
            tiles, text = await shown_and_measured(shown, client)
            assert tiles["reward"] == pytest.approx(metric(text, "reward_mean"), abs=0.005)
            assert tiles["ess"] == pytest.approx(metric(text, "ess_ratio"), abs=0.005)
            assert 0 <= tiles["parity"] <= PARITY_NATS
        finally:
            os.killpg(verifier, signal.SIGCONT)


# Kills and scaling


def members(run: RunningCommand, began: int) -> list[int]:
    return [step["weight_update"]["members"] for step in run.metrics()[began:] if step["weight_update"]]


@phase()
async def trainer_killed(tour: Tour, calm: Calm) -> dict[str, Any]:
    """What the page said about it, and whether the trainer's address and process are as before."""
    run = tour.run
    address = run.run_dir / "addresses" / "trainer.json"
    async with opened(tour.browser, tour.url) as shown:
        version = await shown.version_above(4)
        before, pid = read_address(address).http, run.pids()["trainer"]
        os.kill(read_address(address).pid, signal.SIGKILL)
        await shown.until("() => document.querySelector('main').dataset.link === 'lost'")
        said = await shown.page.inner_text(".link")
        await shown.until("() => document.querySelector('[data-tile=time] .note').textContent.includes('trainer number 2')")
        await shown.version_above(version)
        await shown.until("() => document.querySelector('main').dataset.link === 'live'")
        history = "fetch('page/history').then((answer) => answer.json())"
        steps = await shown.page.evaluate(f"{history}.then((data) => data.records.map((one) => one.step))")
        same = (read_address(address).http == before, run.pids()["trainer"] == pid)
        return {"link": said, "steps": steps, "problems": shown.problems, "same": same}


async def test_a_killed_trainer_is_replaced_at_the_same_address_and_the_page_follows_it(trainer_killed: dict[str, Any]) -> None:
    assert trainer_killed["same"] == (True, False)
    assert "report.html" in trainer_killed["link"]
    steps = trainer_killed["steps"]
    assert steps == list(range(1, len(steps) + 1)), "those that the restart undid are told once"
    assert [one for one in trainer_killed["problems"] if "ERR_" not in one] == [], "but for the connection that was lost"


@phase()
async def actor_killed(tour: Tour, trainer_killed: dict[str, Any]) -> list[int]:
    """Actors that served the versions offered since one was killed."""
    began = len(tour.run.metrics())
    await tour.run.next_message("announce", VICTIM)
    tour.run.kill(VICTIM)
    await tour.run.more_steps()
    await tour.run.until_members(2)
    return members(tour.run, began)


async def test_a_killed_actor_is_evicted_and_comes_back(tour: Tour, actor_killed: list[int]) -> None:
    assert 1 in actor_killed
    assert actor_killed[-1] == 2
    assert f"{VICTIM} was killed by SIGKILL" in tour.run.said


@phase()
async def scaled(tour: Tour, actor_killed: list[int]) -> list[int]:
    """Actors that served the versions offered since one was taken away."""
    began = len(tour.run.metrics())
    await tour.run.scale(1)
    await tour.run.until_members(1)
    await tour.run.more_steps()  # scraped a few times
    return members(tour.run, began)


async def test_an_actor_is_taken_away_while_the_run_trains(scaled: list[int]) -> None:
    assert (set(scaled) <= {1, 2}, scaled[-1]) == (True, 1)


# The end


@dataclass
class Stopped:
    exit_code: int
    end_s: float
    processes_left: list[str]
    summary: dict[str, Any]
    records: list[dict[str, Any]]
    link_said: str
    """By the page that was open."""


@phase()
async def stopped(tour: Tour, scaled: list[int]) -> Stopped:
    run = tour.run
    async with opened(tour.browser, tour.url) as shown:
        await shown.version_above(0)
        end_s = time.time()
        code = await run.interrupt()
        await shown.until("() => document.querySelector('main').dataset.link === 'lost'")
        said = await shown.page.inner_text(".link")
    return Stopped(code, end_s, run.processes_left(), run.summary(), run.metrics(), said)


async def test_ctrl_c_stops_everything_in_order(tour: Tour, stopped: Stopped) -> None:
    run, summary = tour.run, stopped.summary
    assert (stopped.exit_code, stopped.processes_left) == (130, [])
    assert not list(tour.temporary.iterdir())
    assert (summary["interrupted"], summary["steps"]) == (True, len(stopped.records))
    assert ledger_adds_up(summary["sequences"])
    assert all(ledger_adds_up(record["sequences"]) for record in stopped.records)
    assert [record["step"] for record in stopped.records] == list(range(1, len(stopped.records) + 1))
    assert (run.run_dir / "checkpoint" / "config.json").exists()
    assert f"--resume {run.run_dir}" in run.said
    await asyncio.to_thread(audit, run.run_dir)
    assert summary["restarts"] == {VICTIM: 1, "trainer": 1}
    # That of the killed actor. A join between the last checkpoint and the trainer's death is undone with the steps.
    assert summary["membership"]["joins"] >= 1
    assert 0 <= summary["logprob_mismatch_max"] <= PARITY_NATS
    assert summary["parity_failures"] == 0


async def test_the_page_points_to_the_report_which_has_the_same_views(tour: Tour, stopped: Stopped) -> None:
    assert str(tour.run.run_dir / "report.html") in stopped.link_said
    async with opened(tour.browser, (tour.run.run_dir / "report.html").as_uri(), viewport=PHONE) as report:
        await report.until("() => document.querySelectorAll('.samples .tokens .token').length > 10")
        issued = f"{stopped.summary['sequences']['issued']:,}"
        assert await report.page.inner_text("[data-ledger=issued] td") == issued
        assert await too_wide(report.page) == []
        keys = "(legends) => legends.map((one) => [...one.querySelectorAll('.key')].map((key) => key.style.cssText))"
        looks = await report.page.locator(".legend").evaluate_all(keys)
        assert max(map(len, looks)) > 6, "accuracy and pass@k of three sets"
        assert all(len({*one}) == len(one) for one in looks), "no two lines of a chart look alike"
        assert await barriers(report.page) == []
        assert report.problems == []


# What Prometheus took


def found(tour: Tour, stopped: Stopped, query: str, namespace: str = "") -> list[dict[str, Any]]:
    """Series of a dashboard's or alert's query over the whole run."""
    chosen = re.sub(r"\$(window|__rate_interval|__range)\b", WINDOW, query)
    chosen = chosen.replace("$namespace", namespace).replace("$run", ".+")
    return tour.prometheus.query_range(chosen, tour.start_s, stopped.end_s, 1.0)


async def test_every_documented_metric_has_a_series_but_those_listed(tour: Tour, stopped: Stopped) -> None:
    names = {one["metric"]["__name__"] for one in found(tour, stopped, '{__name__=~"pipelinerl_.+"}')}
    of = {name: family.name for name, family in samples().items()}
    shown = {of[name] for name in names if name in of}
    assert set(of.values()) - shown - MAYBE.keys() == ABSENT.keys()


@pytest.mark.parametrize("namespace", ["", NAMESPACE], ids=["local", "cluster"])
@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
async def test_every_query_of_every_panel_finds_data(tour: Tour, stopped: Stopped, board: Board, namespace: str) -> None:
    """An empty pattern takes only series without the label, as those of a local Prometheus are."""
    wrong, families = [], samples()
    for panel in board.panels:
        for query in panel.queries:
            names = {families[name].name for name in names_in(query.expr)}
            none = bool(names & ABSENT.keys()) or (namespace != "" and "pipelinerl_runner_" in query.expr)
            data = bool(found(tour, stopped, query.expr, namespace))
            if data == none and not names & MAYBE.keys():
                wrong.append(f"{panel.title}: {query.expr} ({'data' if data else 'nothing'})")
    assert wrong == []


async def test_every_alert_looks_at_series_that_are_there(tour: Tour, stopped: Stopped) -> None:
    missing = []
    for name, rule in shown_alerts().items():
        for selector in re.findall(r"\w+\{.*?\}", rule["expr"]):
            well_or_not = re.sub(r', \w+!=".*?"', "", selector)  # what went wrong has series when it first does
            if not selector.startswith(tuple(MAYBE)) and not found(tour, stopped, well_or_not):
                missing.append(f"{name}: {selector}")
    assert missing == []


async def test_alerts_are_silent_in_the_healthy_part_and_see_the_faults(tour: Tour, calm: Calm, stopped: Stopped) -> None:
    rules = tour.prometheus.rules()
    assert {rule["name"] for rule in rules} == set(shown_alerts())
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []

    def fired(start_s: float, end_s: float) -> set[str]:
        series = tour.prometheus.query_range('ALERTS{alertstate="firing"}', start_s, end_s, 1.0)
        return {one["metric"]["alertname"] for one in series}

    # A process that is gone refuses a scrape at once. On a busy machine a scrape takes its whole second, and says nothing.
    gone, late = (f"up == 0 and scrape_duration_seconds {than} 0.9" for than in ("<", ">="))
    assert tour.prometheus.query_range(gone, calm.start_s, calm.end_s, 1.0) == []
    is_busy = bool(tour.prometheus.query_range(late, tour.start_s, calm.end_s, 1.0))
    assert fired(calm.start_s, calm.end_s) <= OF_SPEED | ({"PipelineRLTrainerDown"} if is_busy else set())
    assert fired(calm.end_s, stopped.end_s) >= {"PipelineRLTrainerDown"}


# Resumed


@dataclass
class Resumed:
    run: RunningCommand
    starts_before: list[int]
    exit_code: int
    last: int
    """The step at which it was told to end."""


@phase()
async def resumed(tour: Tour, stopped: Stopped) -> AsyncIterator[Resumed]:
    run_dir, last = tour.run.run_dir, stopped.summary["policy_version"] + 8
    end = settings(trainer__steps=last, evaluation__every_steps=4)
    starts = tour.run.read("lineage.json")["starts"]
    (before := run_dir.parent / "before").mkdir()
    for name in ("recipe.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "lineage.json"):
        shutil.copy(run_dir / name, before)
    with started_run("", run_dir, *end, resume=True, environment={"PYTHONPATH": str(ROOT)}) as run:
        yield Resumed(run, starts, await run.ended(), last)


async def test_the_run_goes_on_to_a_later_end_and_leaves_a_complete_folder(resumed: Resumed, stopped: Stopped) -> None:
    run, last = resumed.run, resumed.last
    assert resumed.exit_code == 0, run.said
    summary, records = run.summary(), run.metrics()
    assert len(resumed.starts_before) == 2  # of the first trainer and of that after the kill
    assert run.read("lineage.json")["starts"] == [*resumed.starts_before, stopped.summary["policy_version"]]
    assert [record["step"] for record in records] == list(range(1, last + 1))
    assert (summary["steps"], summary["policy_version"], summary["interrupted"]) == (last, last, False)
    assert summary["sequences"]["trained"] == sum(record["sequences_trained"] for record in records)
    assert summary["sequences"]["trained"] > stopped.summary["sequences"]["trained"]
    evaluated = {one["version"] for one in summary["heldout"]}  # of two that end in one step, a record has the last
    assert evaluated >= {0, last // 4 * 4, last // 4 * 4 - 4, last}
    assert 0 <= summary["logprob_mismatch_max"] <= PARITY_NATS
    assert summary["sequences_multi_version_fraction"] > 0
    assert summary["lag"]["max"] <= 4
    assert summary["largest_lag"] == records[-1]["largest_lag"] >= 1
    assert all(record["value_loss"] >= 0 for record in records)
    assert records[-1]["weight_update"]["members"] == 1, "as the run was scaled"
    of_tasks = Counter[str]()
    for record in records:
        of_tasks.update({name: figures["sequences"] for name, figures in record["tasks"].items()})
        assert all(one["completion_tokens_mean"] <= 16 for name, one in record["tasks"].items() if name == "short-sums")
    issued, few, short = summary["sequences"]["issued"], 64, of_tasks["short-sums"]
    assert of_tasks["sums"] / (of_tasks["sums"] + short) == pytest.approx(2 / 3, abs=0.1), "over kills, a stop and a resumption"
    lost = issued - of_tasks.total()  # mostly talks: the slower the machine is, the more episodes become too old
    assert issued / 4 - lost - few <= of_tasks["talks"] <= issued / 4 + few
    evaluations = summary["heldout"][-1]["sets"]
    assert {name: one["unanswered"] for name, one in evaluations.items()} == {"sums": 0, "short-sums": 0, "talks": 0}
    with_talks = [record for record in records if "talks" in record["tasks"]]
    assert {record["turns_mean"] for record in with_talks} == {3}, "none was lost or sampled twice"
    assert {record["branches_mean"] for record in with_talks} == {1}
    assert all(0 < record["observed_fraction"] < 1 for record in with_talks)
    assert set(run.pids()) == {"nats", "verifier", "trainer", "actor-0"}
    for name in ("recipe.yaml", "samples.jsonl", "report.html", "checkpoint/config.json", "checkpoint/value_head"):
        assert (run.run_dir / name).exists(), name
    assert any((run.run_dir / "checkpoints").glob("step-*"))
    assert [*(run.run_dir.parent / "store").rglob("latest")]
    assert {path.stem for path in (run.run_dir / "logs").iterdir()} >= {"trainer", "verifier", "actor-0", "actor-1"}
    assert run.processes_left() == []
    await asyncio.to_thread(audit, run.run_dir)


async def test_the_run_is_compared_with_its_own_state_before(tour: Tour, resumed: Resumed, stopped: Stopped) -> None:
    folder = resumed.run.run_dir.parent
    runs, page = (str(folder / "before"), str(resumed.run.run_dir)), folder / "compare.html"
    done = pipelinerl("compare", *runs, "--out", str(page), "--csv", str(folder / "rows.csv"))
    assert done.returncode == 0, done.stderr
    assert (folder / "rows.csv").read_text().count(f"\n{resumed.run.run_dir.name},") >= resumed.last
    for width in (400, 1000, 1600):
        async with opened(tour.browser, page.as_uri(), viewport={"width": width, "height": 900}) as shown:
            row = shown.page.locator("tr", has_text="trainer.steps").locator("td").last
            assert await row.inner_text() == str(resumed.last)
            outcomes = await shown.page.locator("tr", has_text="Outcome").locator("td").all_inner_texts()
            assert [one.split(";")[0] for one in outcomes] == ["interrupted", "finished"]
            assert await shown.page.locator(".sample").count() >= 4, "of two held-out problems or more"
            assert await shown.page.locator("svg text.end", has_text="B").count() == 7, "at the end of each curve"
            seconds = shown.page.locator("input[value=time]")
            assert await seconds.is_checked()
            await seconds.press("ArrowRight")
            assert await shown.page.locator("svg text", has_text="step").count() == 7
            assert await too_wide(shown.page) == []
            assert await barriers(shown.page) == []
            assert (shown.problems, shown.requests) == ([], [page.as_uri()])


def answers_in_a_terminal(run_dir: Path) -> None:
    """`pipelinerl chat` answers as transformers generates, with each version; `serve` names the run and its checkpoint."""
    import torch

    (earlier, last), policy = sorted(policies_of(run_dir)), Run(run_dir).policy()
    prompt = torch.tensor([policy.prompt("1+2=")])
    with torch.inference_mode():
        tokens = policy.model.generate(prompt, do_sample=False, max_new_tokens=policy.max_tokens)[0][prompt.shape[1] :]
    expected = policy.tokenizer.decode(tokens, skip_special_tokens=True)
    with terminal(PROGRAM, "chat", str(run_dir), "--temperature", "0") as shown:
        assert f"v{last} of {run_dir}/checkpoint with no chat template (plain prompts" in shown.until("\n> ")
        for typed, answer in (
            ("1+2=", f"v{last}> {expected}"),
            ("/versions", f"{earlier} {last}"),
            (f"/version {earlier}", f"v{earlier} of {run_dir}/checkpoints/step-{earlier}"),
        ):
            shown.say(f"{typed}\n")
            assert shown.until("\n> ") == f"{typed}\n{answer}\n> "
        shown.say("1+2=\n")
        shown.until(f"v{earlier}> ")
        shown.say("\x03")  # the answer may end before, which changes nothing
        shown.until("\n> ")
        shown.say("\x04")
        assert shown.process.wait() in (0, 130), "130 if the interrupt comes with the end of the input"
    served = pipelinerl("serve", str(run_dir), "--print", "--", "--port", "1")
    name = json.loads((run_dir / "run.json").read_text())["run"]
    served_by = f"--served-model-name {name} --dtype float32 --host 127.0.0.1 --port 1"
    model = [str(run_dir / "checkpoint"), *served_by.split()]
    assert shlex.split(served.stdout)[-len(model) :] == model, served.stderr


async def test_a_folder_that_init_wrote_trains_as_it_is_with_its_own_reward_and_its_policy_answers(tmp_path: Path) -> None:
    assert pipelinerl("init", str(tmp_path / "my-task")).returncode == 0
    shorter = settings(trainer__steps=4, checkpoint__every_steps=2)
    with started_run(tmp_path / "my-task" / "recipe.yaml", tmp_path / "run", *shorter) as run:
        assert await run.ended() == 0, run.said
    assert run.summary()["steps"] == 4
    rewards = {json.loads(line)["reward"] for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()}
    assert 0.1 in rewards <= {0.0, 0.1, 1.0}, "only the folder's reward gives a tenth"
    assert (tmp_path / "run" / "modules" / "reward.py").is_file()
    audit(tmp_path / "run")
    await asyncio.to_thread(answers_in_a_terminal, tmp_path / "run")


async def test_the_notebook_in_examples_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    shown = [cell for cell in notebook.cells if cell.cell_type == "code"]
    committed = [cell.outputs for cell in shown]
    patience = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), RUN_TIMEOUT_S)
    await NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}, **patience).async_execute()
    for cell, before in zip(shown, committed, strict=True):
        outputs = [[one.output_type for one in all_ if one.output_type != "stream"] for all_ in (cell.outputs, before)]
        assert outputs[0] == outputs[1], cell.source
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert "def last_number" in (run_dir / "modules" / "notebook_reward.py").read_text()
    rewards = {json.loads(line)["reward"] for line in (run_dir / "samples.jsonl").read_text().splitlines()}
    assert rewards <= {0.0, 0.1, 1.0}, "of the function in the notebook"
    assert "<iframe src=" in shown[2].outputs[-1].data["text/html"], "the live page"
    assert "image/png" in shown[-2].outputs[-1].data
    version, (first, _) = ast.literal_eval(shown[-1].outputs[-1].data["text/plain"])
    assert (version, first[:1].isdecimal()) == (12, True)
    audit(run_dir)
