"""What ranks other than 0 do: carry out rank 0's orders until the last one.

Consumes orders; produces its share of gradients, weights, results and checkpoints. Rank 0 unblocks it; when rank 0 is gone,
waiting ends with an error, and torchrun ends the other ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from services.trainer.learn.share import TRAIN, StepShare
from services.trainer.learn.step import Learner
from services.trainer.ranks.lead import ADAPTER, BEAT, END, SAVE, SCORE, VALUE_HEAD, WEIGHTS
from services.trainer.ranks.message import Message
from services.trainer.ranks.saver import FollowingSaver

log = logging.getLogger(__name__)


def follow(
    learner: Learner,
    heard: Callable[[str], None] = lambda kind: None,
    trained: Callable[[int], None] = lambda version: None,
) -> None:
    """Returns after rank 0's last order; `heard` is told of each one's kind, `trained` of the version that a step made.

    Raises `ServiceError` when rank 0 is gone without it, and whatever an order raises.
    """
    links = learner.world.links
    assert links is not None, "a rank that is alone has nobody to follow"
    saver = FollowingSaver(learner)
    while (order := links.hear()).kind != END:
        heard(order.kind)
        if order.kind == SAVE:
            saver.save()
        else:
            carry_out(order, learner)
        if order.kind == TRAIN:
            trained(order.fields["version"] + 1)
    saver.end()


def carry_out(order: Message, learner: Learner) -> None:
    """One order, together with the other ranks."""
    if order.kind == TRAIN:
        result = learner.compute(StepShare.from_message(order))
        world = learner.world
        if world.layout.sequence_index == 0 and world.links is not None:
            fields = {"memory_peak_bytes": result.memory_peak_bytes}
            world.links.report(Message("result", fields, {"values": result.values}))
    elif order.kind == SCORE:
        learner.score(order.arrays["token_ids"])
    elif order.kind in (WEIGHTS, ADAPTER, VALUE_HEAD):
        gathered = {WEIGHTS: learner.weights, ADAPTER: learner.adapter, VALUE_HEAD: learner.value_head}
        for _ in gathered[order.kind]():
            pass
    else:
        assert order.kind == BEAT, f"rank 0 gave an order that this rank does not know: {order.kind}"
