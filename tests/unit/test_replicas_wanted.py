"""How many actors are wanted: by hand, as properties, and in a loop with an autoscaler that follows."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from pipelinerl.rl.autoscaling import ReplicasWanted, replicas_wanted
from pipelinerl.v1.actor_pb2 import ActorState
from services.trainer.reporting.metrics import replica_advice
from tests.unit.builders import make_recipe

MANY = 1_000_000


def test_by_hand() -> None:
    # The trainer uses up 512 sequences in 32 s, 16 a second; a full actor makes 2.5 a second: 6.4 actors.
    assert replicas_wanted(512 / 32 / 2.5, MANY) == 7
    assert replicas_wanted(6.4, 4) == 4
    assert replicas_wanted(0.01, 4) == 1


def test_a_full_actors_rate_by_hand_and_small_changes_change_nothing() -> None:
    one, wanted = advice(batch_size=1), []
    for _ in range(4):
        one.step(100, 0.1)
    for finished, first, last in ((200, 2, 3), (300, 10, 10), (200, 2, 3), (350, 2, 3)):  # in 100 s, before it an evaluation
        one.actors({}, measuring=True)
        one.actors(counts((0, 0.0, first)))
        one.actors(counts((finished, 100.0, last)))
        wanted.append(one.wanted)
    # 1,000 sequences a second, by actors of 2 / sqrt(0.25) = 4 a second each, then of 3 when full, which only 3.5 can exceed.
    assert wanted == [250, 334, 334, 286]
    # Of 10, up to 10.1 may be needed, and down to 10 - 1 - 1 = 8.
    assert [replicas_wanted(needed, MANY, current=10) for needed in (10.1, 10.11, 8.0, 7.99)] == [10, 11, 10, 8]
    assert [replicas_wanted(needed, MANY, current=2) for needed in (1.2, 0.81, 0.79)] == [2, 2, 1]
    assert replicas_wanted(10.0, most=3, current=10) == 3


def advice(**changes: int) -> ReplicasWanted:
    return ReplicasWanted(**{"slots": 10, "batch_size": 100, "in_flight": MANY, **changes})


def load(finished: float, busy_s: float, in_progress: int) -> ActorState:
    return ActorState(sequences_finished=round(finished), busy_s=busy_s, sequences_in_progress=in_progress, uptime_s=1000.0)


def counts(*actors: tuple[int, float, int]) -> dict[str, ActorState]:
    return {f"actor-{number}": load(*one) for number, one in enumerate(actors)}


def test_from_steps_and_counters_by_hand() -> None:
    one = advice()
    one.actors(counts((0, 0.0, 10), (50, 100.0, 10)))
    one.actors(counts((60, 30.0, 10), (110, 130.0, 10)))  # 120 sequences in 60 busy seconds, full: 2 a second
    assert one.wanted is None
    for seconds in (1000.0, 10.0, 10.0, 25.0):  # the first is left out; the median of the others is 10
        assert one.wanted is None
        one.step(100, seconds)
    assert one.wanted == 5  # 100 / 10 / 2


@pytest.mark.parametrize(
    ("looks", "wanted"),
    [
        ([(0, 0.0), (99, 100.0)], None),  # fewer than one step's sequences
        ([(0, 0.0), (1000, 59.0)], None),  # less than a minute
        ([(1000, 500.0), (900, 90.0)], None),  # another process
        ([(1000, 500.0), (900, 90.0), None, (1900, 590.0)], None),  # an evaluation ran between
        ([(1000, 500.0), (900, 90.0), None, (1900, 590.0), (2100, 690.0)], 5),  # 200 in 100 s
    ],
)
def test_too_little_to_judge_by(looks: list[tuple[int, float] | None], wanted: int | None) -> None:
    one = advice()
    for seconds in (10.0, 10.0, 10.0, 10.0, 0.0):
        one.step(100, seconds)
    one.step(0, 10.0)
    for look in looks:
        one.actors(counts((*look, 10)) if look else {}, measuring=look is None)
    assert one.wanted == wanted
    one.finish()
    assert one.wanted == 1


def linear(in_progress: float) -> float:
    return in_progress / 10


def saturating(in_progress: float) -> float:
    return min(in_progress, 2) / 2


def bending(in_progress: float) -> float:
    return in_progress / 5 / (1 + in_progress / 10)


def follow(rate: Callable[[float], float], consumption: float, actors: int, in_flight: int) -> list[int]:
    """Numbers of actors of an autoscaler that does what is wanted at once. `rate(n)`: of an actor with n in progress."""
    one, slots, history = advice(in_flight=in_flight), 10, []
    finished, busy_s = 0.0, 0.0
    one.step(100, 1.0)
    for _ in range(400):
        most = min(slots, in_flight / actors)
        in_progress = most
        if actors * rate(most) > consumption:  # the bound keeps the actors from going faster
            low, high = 0.0, most
            for _ in range(50):
                middle = (low + high) / 2
                low, high = (middle, high) if actors * rate(middle) < consumption else (low, middle)
            in_progress = high
        one.step(100, 100 / consumption)
        finished, busy_s = finished + 30 * rate(in_progress), busy_s + 30
        one.actors({str(n): load(finished, busy_s, round(in_progress)) for n in range(actors)})
        actors = one.wanted or actors
        history.append(actors)
    return history


@pytest.mark.parametrize("rate", [linear, saturating, bending])
@pytest.mark.parametrize("actors", [1, 3, 8, 30])
@pytest.mark.parametrize("consumption", [0.4, 2.95, 7.6])
def test_an_autoscaler_settles_at_what_is_needed(rate: Callable[[float], float], actors: int, consumption: float) -> None:
    history = follow(rate, consumption, actors, in_flight=MANY)
    needed = consumption / rate(10)
    assert len(set(history[200:])) == 1, history
    assert needed - 0.15 <= history[-1] <= max(1, needed * 1.15 + 2.1)


def test_more_actors_than_a_recipes_bound_occupies_are_not_wanted() -> None:
    assert follow(linear, consumption=100.0, actors=1, in_flight=40)[-1] == 4
    trainer = {"steps": 5, "batch_size": 4, "tokens_per_microbatch": 64}
    for mode, algorithm, most in (
        ("pipeline", {"max_lag": 2}, 3 * 4),
        ("pipeline", {"max_lag": None}, 5 * 4),  # all sequences of the run
        ("conventional", {"max_lag": None, "conventional_g": 2}, 2 * 4),
    ):
        recipe = make_recipe(mode=mode, algorithm=algorithm, trainer=trainer, actor={"sequences_in_progress": 1})
        one = replica_advice(recipe, CollectorRegistry())
        one.actors({"a": load(0, 0.0, 1)})
        one.actors({"a": load(60, 60.0, 1)})
        for _ in range(4):
            one.step(4, 0.01)
        assert one.wanted == most
