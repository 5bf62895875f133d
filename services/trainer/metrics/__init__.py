"""What the trainer exports to Prometheus, one file per topic. Sums and rates are the server's business.

Figures of an optimizer step come with its record; states are read when they are scraped, on the HTTP thread.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from pipelinerl.service.metric_set import MetricSet
from services.trainer.metrics.learning import LearningMetrics
from services.trainer.metrics.membership import MembershipMetrics
from services.trainer.metrics.outcomes import OutcomeMetrics
from services.trainer.metrics.progress import ProgressMetrics
from services.trainer.metrics.queues import QueueMetrics
from services.trainer.metrics.token_lag import TokenLagMetrics
from services.trainer.metrics.work import WorkMetrics
from services.trainer.report.records import StepRecord

PREFIX = "pipelinerl_trainer"


class TrainerMetrics:
    """All of them on one registry. What is read at a scrape has no series before its topic's `watch`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        metrics = MetricSet(PREFIX, registry)
        self.registry = registry
        self.progress = ProgressMetrics(metrics)
        self.learning = LearningMetrics(metrics)
        self.token_lag = TokenLagMetrics(metrics)
        self.work = WorkMetrics(metrics)
        self.outcomes = OutcomeMetrics(metrics)
        self.queues = QueueMetrics(metrics)
        self.membership = MembershipMetrics(metrics)

    def observe(self, record: StepRecord) -> None:
        """Takes one step's record, as it goes to metrics.jsonl."""
        self.learning.observe(record)
        self.token_lag.observe(record)
        self.work.observe(record)
