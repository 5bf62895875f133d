"""Which of the documented metrics a run really shows: all of them, but for those that are listed here with the reason."""

from __future__ import annotations

import json
import time
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from deploy.tools.metrics_reference import catalogue

NOT_IN_A_SHORT_HEALTHY_RUN = {
    "pipelinerl_trainer_checkpoint_version": "none is written before step 4",
    "pipelinerl_trainer_reference_kl_nats": "no KL term",
    "pipelinerl_trainer_value_loss": "no learned baseline",
    "pipelinerl_trainer_explained_variance_ratio": "no learned baseline",
    "pipelinerl_trainer_mfu_ratio": "the CPU's peak is not known",
    "pipelinerl_trainer_mismatch_kl_nats": "a step may have no token of lag 0",
    "pipelinerl_trainer_failed_sequences": "nothing fails",
    "pipelinerl_trainer_rank_orders_total": "one rank",
    "pipelinerl_actor_replicas_wanted": "known after more steps",
    "pipelinerl_actor_sequences_failed_total": "nothing fails",
}


def all_are_shown(runner: str, within_s: float = 60.0) -> None:
    """Waits until each has a series: some come with an evaluation, with a probe, or when the streams are looked at."""
    deadline_s = time.monotonic() + within_s
    while without := missing(runner):
        assert time.monotonic() < deadline_s, f"without a series: {without}"
        time.sleep(0.2)


def missing(runner: str) -> dict[str, set[str]]:
    """By service, the documented metrics without a series, those above left out. `runner`: host:port of the local runner."""
    with urlopen(f"http://{runner}/targets") as answer:
        targets = json.load(answer)
    shown: dict[str, set[str]] = {}
    for target in targets:
        names = series_of(target["targets"][0])
        shown[target["labels"]["service"]] = shown.get(target["labels"]["service"], set()) | names
    documented = {service: {one.family.name for one in metrics} for service, metrics in catalogue().items()}
    assert shown.keys() == documented.keys()
    without = {
        service: names - shown[service] - NOT_IN_A_SHORT_HEALTHY_RUN.keys() for service, names in documented.items()
    }
    return {service: names for service, names in without.items() if names}


def series_of(address: str) -> set[str]:
    """Metrics of one process that have a series, a counter's with `_total`."""
    with urlopen(f"http://{address}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        f"{family.name}_total" if family.type == "counter" else family.name for family in families if family.samples
    }
