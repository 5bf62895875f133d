"""PromQL of the panels: small functions from a metric's name, without its prefix, to the text of a query. Pure.

Every query aggregates, so that a line goes on when a pod comes back under another address, and keeps runs of one name in
several namespaces apart. Every query selects by the variables `$namespace` and `$run`; a matcher `.*` also takes series without
the label, as those of a local Prometheus. Quotients are cut where nothing was counted: a quiet minute is a gap and no NaN.
"""

from __future__ import annotations

WINDOW = "[$window]"
"""Of rates and means: the dashboard's variable. A step may take minutes, and a window shorter than two of them sees nothing."""
BETWEEN_POINTS = "[$__rate_interval]"
"""Of increases: it grows with the distance of two points, so that no event falls between them."""


def series(name: str, matchers: str = "") -> str:
    """One metric, of the namespace and run that are chosen; `matchers`: further ones, as in `phase="wait"`."""
    more = f", {matchers}" if matchers else ""
    return f'pipelinerl_{name}{{namespace=~"$namespace", run=~"$run"{more}}}'


def gauge(name: str, *by: str, matchers: str = "", of: str = "max") -> str:
    """A gauge's value by run and `by`; `of`: how several sources become one."""
    return f"{of} by ({_labels(by)}) ({series(name, matchers)})"


def rate(name: str, *by: str, matchers: str = "") -> str:
    """A counter's growth per second; `name` with its `_total`."""
    return f"sum by ({_labels(by)}) (rate({series(name, matchers)}{WINDOW}))"


def increase(name: str, *by: str, matchers: str = "") -> str:
    """A counter's growth before each point. That reaches beyond the point before it: one event may show in several."""
    return f"sum by ({_labels(by)}) (increase({series(name, matchers)}{BETWEEN_POINTS}))"


def in_range(name: str, *by: str) -> str:
    """A counter's growth in the time that the dashboard shows."""
    return f"sum by ({_labels(by)}) (increase({series(name)}[$__range]))"


def mean(name: str, *by: str) -> str:
    """Mean observation of a histogram."""
    return f"{rate(f'{name}_sum', *by)} / ({rate(f'{name}_count', *by)} > 0)"


def quantile(share: float, name: str, *by: str) -> str:
    """Quantile of a histogram, to the width of its buckets."""
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', 'le', *by)}) >= -Inf"


def buckets(name: str) -> str:
    """Observations per second by bucket, of all runs that are chosen: for a heat map."""
    return f"sum by (le) (rate({series(f'{name}_bucket')}{WINDOW}))"


def by_actor(vector: str, of: str = "max", *by: str) -> str:
    """Aggregates by the label `actor`: the pod's name in a cluster, else what Prometheus calls the instance."""
    instance = f'label_replace({vector}, "actor", "$1", "instance", "(.+)")'
    return f'{of} by ({_labels(("actor", *by))}) (label_replace({instance}, "actor", "$1", "pod", "(.+)"))'


def actor_gauge(name: str, *by: str) -> str:
    """A gauge of each actor."""
    return by_actor(series(f"actor_{name}"), "max", *by)


def actor_rate(name: str, *by: str) -> str:
    """A counter's growth per second, of each actor."""
    return by_actor(f"rate({series(f'actor_{name}')}{WINDOW})", "sum", *by)


def actor_mean(name: str) -> str:
    """Mean observation of each actor's histogram."""
    return f"{actor_rate(f'{name}_sum')} / ({actor_rate(f'{name}_count')} > 0)"


def _labels(by: tuple[str, ...]) -> str:
    return ", ".join(("namespace", "run", *by))
