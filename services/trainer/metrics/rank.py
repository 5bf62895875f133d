"""What the first rank of a further node exports, for its node's pod."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from pipelinerl.service.metric_set import MetricSet
from services.trainer.learn.share import TRAIN
from services.trainer.ranks.lead import ADAPTER, BEAT, SAVE, SCORE, VALUE_HEAD, WEIGHTS

ORDERS = (TRAIN, SCORE, WEIGHTS, ADAPTER, VALUE_HEAD, SAVE, BEAT)


class RankMetrics:
    """Counted on the thread that carries the orders out."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.orders = MetricSet("pipelinerl_trainer", registry).counter(
            "rank_orders_total",
            "Orders of rank 0 to the first rank of a further node.",
            {"kind": ORDERS},
            unit="orders",
        )
