"""A real run whose four services send their spans to a real collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.conftest import RunningCommand
from tests.support.collector import Collector, ReceivedSpan, collecting

pytestmark = pytest.mark.e2e

FEW_STEPS = ("--set", "trainer.steps=3", "--set", "actor.count=2", "--set", "checkpoint.every_steps=0")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as collector:
        # The whole URL, too, so that vLLM's workers would begin to trace by themselves if they saw it.
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret")
        yield collector


def test_traces_of_a_run(collector: Collector, start_run: Callable[..., RunningCommand]) -> None:
    run = start_run(*FEW_STEPS)
    assert run.wait() == 0, run.output.read_text()

    assert {span.service for span in collector.spans} == {
        "pipelinerl-trainer",
        "pipelinerl-actor",
        "pipelinerl-verifier",
    }
    (name,) = {span.resource["pipelinerl.run"] for span in collector.spans}
    assert name.startswith("tiny-")
    assert {headers["authorization"] for headers in collector.headers} == {"secret"}
    check_sequences(collector, run)
    check_updates(collector)
    check_evaluation(collector)


def check_sequences(collector: Collector, run: RunningCommand) -> None:
    """Every trained sequence is one connected tree over feeder, actor, verifier and trainer."""
    counts = run.summary()["sequences"]
    trained = collector.named("sequence.train")
    assert len(trained) == counts["trained"]
    steps = {span.id: span for span in collector.named("step.train")}
    assert [span.attributes["pipelinerl.policy.version"] for span in steps.values()] == [1, 2, 3]
    by_id = {span.id: span for span in collector.spans}
    for end in trained:
        way = [end]
        while way[-1].parent:
            way.append(by_id[way[-1].parent])
        assert [(span.name, span.service.removeprefix("pipelinerl-")) for span in reversed(way)] == [
            ("group.issue", "trainer"),
            ("sequence.generate", "actor"),
            ("sequence.publish", "actor"),
            ("sequence.receive", "trainer"),
            ("sequence.train", "trainer"),
        ]
        assert len({span.trace for span in way}) == 1
        check_reward(collector, way[-2])
        assert (
            steps[end.links[0]].attributes["pipelinerl.policy.version"] == end.attributes["pipelinerl.policy.version"]
        )
        assert steps[end.links[0]].id in {step.id for step in steps.values() if way[1].id in step.links}


def check_reward(collector: Collector, generated: ReceivedSpan) -> None:
    asked = next(span for span in collector.children(generated) if span.name == "sequence.verify")
    (answered,) = collector.children(asked)
    (scored,) = collector.children(answered)
    assert [span.service for span in (generated, asked, answered, scored)] == [
        "pipelinerl-actor",
        "pipelinerl-actor",
        "pipelinerl-verifier",
        "pipelinerl-verifier",
    ]
    assert (answered.name, scored.name) == ("sequence.verify", "reward.score")
    assert generated.attributes["gen_ai.usage.output_tokens"] > 0


def check_updates(collector: Collector) -> None:
    """The spans of an update of all cover the trainer and every member."""
    updates = [span for span in collector.named("weight_update") if "pipelinerl.actor" not in span.attributes]
    assert [span.attributes["pipelinerl.policy.version"] for span in updates] == [0, 1, 2, 3]
    for update in updates:
        below = collector.below(update)
        of_trainer = [span.name for span in below if span.service == "pipelinerl-trainer"]
        assert {"weight_update.announce", "weight_update.transfer", "weight_update.commit"} <= set(of_trainer)
        for actor in ("actor-0", "actor-1"):
            of_actor = {span.name for span in below if span.instance == actor}
            parts = ("receive", "stage", "commit", "load")
            assert of_actor == {f"weight_update.{part}" for part in parts}, (update, of_actor)
        assert sorted(update.events) == ["serving"] * 2 + ["staged"] * 2
        assert of_trainer.count("weight_update.answer") == 4


def check_evaluation(collector: Collector) -> None:
    for evaluation in collector.named("evaluation"):
        instances = {span.instance for span in collector.below(evaluation) if span.name == "evaluation.generate"}
        assert instances == {"trainer", "actor-0", "actor-1"}
