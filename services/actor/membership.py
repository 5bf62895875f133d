"""What others are told of this actor: the trainer that it is there, and Kubernetes what stopping it would cost."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping

from pipelinerl.bus.jetstream import Bus
from pipelinerl.errors import BusError
from pipelinerl.kube.client import KubeBackoff, KubeClient, KubeError
from pipelinerl.messages.control import Registration
from services.actor.engine import InferenceEngine
from services.actor.generation import ServingGate
from services.actor.hand_over import HeldGroup, HeldGroups
from services.actor.metrics import ActorMetrics

log = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
MOST = 2**31 - 1
"""The annotation is an int32."""
EVERY_S = 15.0
CHANGED_SHARE, CHANGED_TOKENS = 0.2, 256
"""Of what was told last: a cost that differs by less is told as it was. An actor at work has sequences of all lengths in hand,
whose sum moves little; the order of busy pods is then true to a fifth, and that of idle and busy ones exact."""


def work_in_hand(unfinished: Iterable[HeldGroup], progress: Mapping[str, int]) -> int:
    """Tokens of all unstored samples: what there is of each, and what the engine has added since. Pure."""
    tokens = 0
    for held in unfinished:
        tokens += sum(len(sample.completion_token_ids) for sample in held.partials.values())
        tokens += sum(progress.get(held.group.sequence_id(index), 0) for index in held.missing)
    return min(tokens, MOST)


def worth_telling(told: int | None, cost: int) -> bool:
    """Whether `cost` may change which pod is the cheapest; `told` None: nothing was told yet. Pure."""
    if told is None or (told == 0) != (cost == 0):
        return True
    return abs(cost - told) > max(CHANGED_TOKENS, CHANGED_SHARE * told)


class DeletionCost:
    """Has Kubernetes take the cheapest pod first when it scales down.

    The cost is the work that a hand-over would pass on: tokens of the sequences in hand that are not stored yet, those that
    another actor generated before included. Each has to be prefilled anew elsewhere. An idle actor costs 0. Consumes the groups
    in hand and the engine's progress, produces the gauge and the pod's annotation. It waits for the clock. Kubernetes advises
    against frequent updates of the annotation: it is written at most every `every_s` and only when the cost has changed enough
    to change an order of pods. Without API or permission one line says so and generation does not notice.

    `client` None: no Kubernetes, only the gauge. `pod`: this one's name; `uid` may be empty."""

    def __init__(
        self,
        client: KubeClient | None,
        held: HeldGroups,
        engine: InferenceEngine,
        metrics: ActorMetrics,
        *,
        pod: str,
        uid: str,
        every_s: float = EVERY_S,
        backoff: KubeBackoff | None = None,
    ) -> None:
        self._client, self._held, self._engine, self._metrics = client, held, engine, metrics
        self._pod, self._uid, self._every_s = pod, uid, every_s
        self._backoff = backoff or KubeBackoff(first_s=every_s, most_s=20 * every_s)
        self._told: int | None = None
        self._failures = 0
        self._not_before_s = 0.0

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            while True:
                cost = work_in_hand(self._held.unfinished(), self._engine.progress())
                self._metrics.deletion_cost.set(cost)
                if self._client is not None and worth_telling(self._told, cost) and _now() >= self._not_before_s:
                    await self._tell(self._client, cost)
                # actors that start together do not stay so
                await asyncio.sleep(self._every_s * random.uniform(0.8, 1.2))
        finally:
            if self._client is not None:
                await self._client.close()

    async def _tell(self, client: KubeClient, cost: int) -> None:
        try:
            await client.annotate_pod(self._pod, self._uid, {ANNOTATION: str(cost)})
        except KubeError as error:
            self._failures += 1
            again = self._failures > 1
            log.log(
                logging.DEBUG if again else logging.WARNING,
                "the deletion cost of this pod is not kept up to date, scaling down may stop a busy actor: %s",
                error,
            )
            self._not_before_s = _now() + self._backoff.after(error, self._failures)
        else:
            if self._failures:
                log.info("the deletion cost of this pod is kept up to date again")
            self._told, self._failures = cost, 0


def _now() -> float:
    return asyncio.get_running_loop().time()


LEAVE_WITHIN_S = 2.0


class Heartbeat:
    """One entry of the membership bucket, refreshed three times per TTL with the current version and phase.

    A process that dies or freezes stops refreshing, and the trainer sees it go. `process` changes at every start, so that a
    restarted actor is a new member. `manifest_id()` is read at each refresh.
    """

    def __init__(
        self,
        bus: Bus,
        gate: ServingGate,
        manifest_id: Callable[[], str],
        *,
        actor: str,
        process: str,
        grpc_address: str,
        ranks: int,
        pod_uid: str = "",
    ) -> None:
        self._bus, self._gate, self._manifest_id = bus, gate, manifest_id
        self._actor, self._process, self._grpc_address, self._ranks = actor, process, grpc_address, ranks
        self._pod_uid = pod_uid
        self._away = self._left = False

    async def run(self) -> None:
        """Runs until cancelled, or until `leave`. A bus that does not take a beat gets the next one; one line says so."""
        while not self._left:
            try:
                await self._bus.put_member(self._actor, self.registration().SerializeToString())
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
                    await self._bus.put_member(self._actor, self.registration().SerializeToString())
                await self._bus.remove_member(self._actor)
        except (BusError, TimeoutError) as error:
            log.warning("cannot remove the registration, it will expire: %s", error or "no answer in time")

    def registration(self) -> Registration:
        served = self._gate.served
        return Registration(
            actor=self._actor,
            process=self._process,
            grpc_address=self._grpc_address,
            ranks=self._ranks,
            manifest_id=self._manifest_id(),
            policy_version=served.number if served else 0,
            incarnation=served.incarnation if served else 0,
            phase=self._gate.phase,
            pod_uid=self._pod_uid,
        )
