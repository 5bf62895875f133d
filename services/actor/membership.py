"""What others are told of this actor: the trainer that it is there, and Kubernetes what stopping it would cost."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from pipelinerl.bus.jetstream import Bus
from pipelinerl.errors import BusError
from pipelinerl.kube.client import KubeBackoff, KubeClient, KubeError
from pipelinerl.messages.control import Registration
from pipelinerl.messages.sequences import PolicyVersion
from services.actor.engine import InferenceEngine
from services.actor.generation import ServingGate
from services.actor.hand_over import HeldGroup, HeldGroups
from services.actor.metrics import ActorMetrics

log = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
MOST = 2**31 - 1
"""The annotation is an int32."""
EVERY_S = 15.0
BACKOFF = KubeBackoff(first_s=EVERY_S, most_s=20 * EVERY_S)
CHANGED_SHARE, CHANGED_TOKENS = 0.2, 256
"""Of what was told last: a cost that differs by less is told as it was. An actor at work has sequences of all lengths in hand,
whose sum moves little; the order of busy pods is then true to a fifth, and that of idle and busy ones exact."""


def work_in_hand(unfinished: Iterable[HeldGroup], progress: Mapping[str, int]) -> int:
    """Tokens of all unstored samples: what there is of each, and what the engine has added since; of an episode, its turns so
    far. Pure."""
    of_turns = Counter[str]()
    for request_id, num_tokens in progress.items():
        of_turns[request_id.rpartition(".")[0]] += num_tokens  # an episode's requests are its sequence's, numbered
    tokens = 0
    for held in unfinished:
        tokens += sum(sample.num_sampled_tokens for sample in held.partials.values()) + held.turn_tokens.total()
        names = map(held.group.sequence_id, held.missing)
        tokens += sum(progress.get(name, 0) + of_turns[name] for name in names)
    return min(tokens, MOST)


def worth_telling(told: int | None, cost: int) -> bool:
    """Whether `cost` may change which pod is the cheapest; `told` None: nothing was told yet. Pure."""
    if told is None or (told == 0) != (cost == 0):
        return True
    return abs(cost - told) > max(CHANGED_TOKENS, CHANGED_SHARE * told)


async def tell_deletion_cost(
    client: KubeClient | None, held: HeldGroups, engine: InferenceEngine, metrics: ActorMetrics, *, pod: str, uid: str
) -> None:
    """Has Kubernetes take the cheapest pod first when it scales down. Runs until cancelled.

    The cost is the work that a hand-over would pass on: tokens of the sequences in hand that are not stored yet, those that
    another actor generated before included. Each has to be prefilled anew elsewhere. An idle actor costs 0. Consumes the groups
    in hand and the engine's progress, produces the gauge and the pod's annotation. It waits for the clock. Kubernetes advises
    against frequent updates of the annotation: it is written at most every `EVERY_S` and only when the cost has changed enough
    to change an order of pods. Without API or permission one line says so and generation does not notice.

    `client` None: no Kubernetes, only the gauge. `pod`: this one's name; `uid` may be empty."""
    told: int | None = None
    failures, not_before_s = 0, 0.0
    try:
        while True:
            cost, now_s = work_in_hand(held.unfinished(), engine.progress()), asyncio.get_running_loop().time()
            metrics.deletion_cost.set(cost)
            if client is not None and worth_telling(told, cost) and now_s >= not_before_s:
                try:
                    await client.annotate_pod(pod, uid, {ANNOTATION: str(cost)})
                except KubeError as error:
                    failures += 1
                    log.log(
                        logging.WARNING if failures == 1 else logging.DEBUG,
                        "the deletion cost of this pod is not kept up to date, scaling down may stop a busy actor: %s",
                        error,
                    )
                    not_before_s = now_s + BACKOFF.after(error, failures)
                else:
                    if failures:
                        log.info("the deletion cost of this pod is kept up to date again")
                    told, failures = cost, 0
            # actors that start together do not stay so
            await asyncio.sleep(EVERY_S * random.uniform(0.8, 1.2))
    finally:
        if client is not None:
            await client.close()


LEAVE_WITHIN_S = 2.0


class Heartbeat:
    """One entry of the membership bucket, refreshed three times per TTL with the current version and phase.

    A process that dies or freezes stops refreshing, and the trainer sees it go. `me`: what does not change; its `process` does
    at every start, so that a restarted actor is a new member. `manifest_id()` is read at each refresh.
    """

    def __init__(self, bus: Bus, gate: ServingGate, manifest_id: Callable[[], str], me: Registration) -> None:
        self._bus, self._gate, self._manifest_id, self._me = bus, gate, manifest_id, me
        self._away = self._left = False

    async def run(self) -> None:
        """Runs until cancelled, or until `leave`. A bus that does not take a beat gets the next one; one line says so."""
        while not self._left:
            try:
                await self._bus.put_member(self._me.actor, self.registration().SerializeToString())
            except BusError as error:
                log.log(logging.DEBUG if self._away else logging.WARNING, "cannot register, will try again: %s", error)
                self._away = True
            else:
                self._away = False
            await asyncio.sleep(self._bus.limits.member_ttl_s / 3)

    async def leave(self) -> None:
        """Removes the registration, once, within `LEAVE_WITHIN_S`; where that fails it expires. No beat follows.

        One that drains says so first: the trainer then knows that it was told to end and takes part for a while yet.
        """
        if self._left:
            return
        self._left = True
        try:
            async with asyncio.timeout(LEAVE_WITHIN_S):
                if self._gate.draining:
                    await self._bus.put_member(self._me.actor, self.registration().SerializeToString())
                await self._bus.remove_member(self._me.actor)
        except (BusError, TimeoutError) as error:
            log.warning("cannot remove the registration, it will expire: %s", error or "no answer in time")

    def registration(self) -> Registration:
        served = self._gate.served or PolicyVersion(0, 0)
        now = Registration(policy_version=served.number, incarnation=served.incarnation)
        now.MergeFrom(self._me)
        now.manifest_id, now.phase = self._manifest_id(), self._gate.phase
        return now
