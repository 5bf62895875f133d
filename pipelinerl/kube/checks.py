"""Check the chart's values against each other and against the recipe, for `pipelinerl validate --chart-values FILE`.

The chart's Job runs this before an install or upgrade changes anything. This module has the checks that need arithmetic or a
parsed recipe. The chart's templates have the simple checks, and those that prevent rendering a wrong object.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import NATS, Recipe
from pipelinerl.recipe.rules import undivided
from pipelinerl.rl.groups import EVALUATION_SLOTS

Values = Mapping[str, Any]
_QUANTITY = re.compile(r"(\d*\.?\d+(?:[eE][+-]?\d+)?|\d+\.)(?:([KMGTPE])i|([numkMGTPE]?))", re.ASCII)
_PORT = re.compile(r"[a-z]+://[^/]*:([0-9]+)(?:/|$)")
_ALLOWED = "(needed even if a NetworkPolicy of yours allows this)"


def problems(values: Values, recipe: Recipe) -> list[FieldError]:
    """Return the errors found: values that Kubernetes would refuse, or with which the run could not work. Pure."""
    return [*_limits(values, values.get("defaultLimits") or {}), *_numbers(values, recipe), *_blocked(values, recipe)]


def quantity(text: str | float) -> Decimal:
    """Return a quantity of Kubernetes, such as 24Gi, 500m or 1e3, as a number. Raises `ValueError` for any other text."""
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        raise ValueError(f"{text!r} is no quantity of Kubernetes")
    unit = (found[2] or found[3] or " ").replace("K", "k")
    return Decimal(found[1]) * Decimal(1024 if found[2] else 1000) ** ("num kMGTPE".index(unit) - 3)


def _limits(values: Values, defaults: Values, path: str = "") -> Iterator[FieldError]:
    for name, part in values.items():
        at = f"{path}{name}"
        if isinstance(part, Mapping) and name.lower().endswith("resources"):
            given = part.get("limits") or {}
            for resource, request in (part.get("requests") or {}).items():
                limit = {**defaults, **given}.get(resource, request)
                if quantity(request) > quantity(limit):
                    field = f"{f'{at}.limits' if resource in given else 'defaultLimits'}.{resource}"
                    less = f"is less than {at}.requests.{resource} = {request}, which Kubernetes refuses"
                    yield FieldError(field, limit, f"{less}; raise the limit, or lower the request")
        elif isinstance(part, Mapping):
            yield from _limits(part, defaults, f"{at}.")


def _numbers(values: Values, recipe: Recipe) -> Iterator[FieldError]:
    nats, actor, verifier, trainer = (values[section] for section in ("nats", "actor", "verifier", "trainer"))
    scaler, expected = actor["autoscaling"], trainer["expectedActors"]
    size, most = nats["persistence"]["size"], nats["sequencesMaxGib"]
    log = nats["weightsMaxGib"] if recipe.weights.log_place == NATS else 0
    if nats["enabled"] and quantity(size) * Decimal("0.75") < quantity(f"{most}Gi") + quantity(f"{log}Gi"):
        beside = f", together with nats.weightsMaxGib = {log}," if log else ""
        fix = f"is{beside} more than three quarters of nats.persistence.size = {size}; enlarge the volume, or lower this"
        yield FieldError("nats.sequencesMaxGib", most, fix)
    rolling = (actor["strategy"].get("rollingUpdate") or {}) if actor["strategy"]["type"] == "RollingUpdate" else {}
    if all(re.fullmatch("0+%?", str(rolling.get(part, "25%"))) for part in ("maxSurge", "maxUnavailable")):
        fix = "maxSurge and maxUnavailable are both 0, so no pod could ever be replaced; raise one of them"
        yield FieldError("actor.strategy.rollingUpdate", rolling, fix)
    scaled = ((one["autoscaling"], one.get("replicas")) for one in (actor, verifier))
    actors, pods = (by["maxReplicas"] if by["enabled"] else replicas for by, replicas in scaled)
    actors, each = max(1, expected) if actors is None else actors, verifier["maxEpisodes"]
    evaluated = EVALUATION_SLOTS if recipe.episodic_tasks else 0
    trained = (recipe.actor.samples_in_progress(one.task) for one in recipe.mixture.values() if one.task.is_episodic)
    wanted = actors * max(trained, default=evaluated)
    if pods is not None and pods * each < wanted:
        fix = f"gives {pods * each} in {pods} pods, but actors keep {wanted} episodes in progress; raise it or the"
        yield FieldError("verifier.maxEpisodes", each, f"{fix} number of pods, or set recipe.set.actor.episodes_in_progress")
    if not trainer["enabled"]:
        return
    least = "autoscaling.minReplicas" if scaler["enabled"] else "replicas"
    if (fewest := scaler["minReplicas"] if scaler["enabled"] else actor.get("replicas")) and expected > fewest:
        fix = f"is more than actor.{least} = {fewest}, so that the first step would wait for ever; make them equal"
        yield FieldError("trainer.expectedActors", expected, fix)
    nodes, here = trainer["nodes"], trainer.get("gpus") or recipe.trainer.ranks
    for one in undivided(recipe.trainer, nodes * here):
        yield FieldError(f"recipe.set.{one.field}", one.value, one.fix)


def _blocked(values: Values, recipe: Recipe) -> Iterator[FieldError]:
    policy, nats, tracing = values["networkPolicy"], values["nats"], values["tracing"]
    if not policy["enabled"]:
        return
    called: list[tuple[str, str, int]] = []
    if not nats["enabled"] and policy["nats"].get("cidrs") and not policy.get("extraEgress"):
        called += [("nats", f"nats.url = {url}", 4222) for url in nats["url"].split(",")]
    if (endpoint := tracing.get("endpoint")) and policy["tracing"].get("to"):
        default = 443 if endpoint.startswith("https:") or tracing["protocol"] == "grpc" else 80
        called.append(("tracing", f"tracing.endpoint = {endpoint}", default))
    for name, where, default in called:
        found, ports = _PORT.search(where), policy[name].get("ports", [])
        if (port := int(found[1]) if found else default) not in ports:
            fix = f"lacks port {port} of {where}, so that nothing could reach it; add this port and, if a Service maps it to "
            yield FieldError(f"networkPolicy.{name}.ports", ports, f"{fix}another, also the port of the pods")
    judges = ", ".join(dict.fromkeys(one.reward.judge.url for one in recipe.sets_by_place.values() if one.reward.judge))
    if judges and not policy.get("verifierEgress"):
        fix = f"is empty, so that no verifier would reach the recipe's judge ({judges}); add a rule to its address {_ALLOWED}"
        yield FieldError("networkPolicy.verifierEgress", [], fix)
    api = policy["kubernetesApi"] if values["kubernetesApi"]["enabled"] and values["trainer"]["enabled"] else {}
    to_networks = 443 in api.get("ports", []) and any(not re.search(r"\.\d+/32$|/128$", cidr) for cidr in api.get("cidrs", []))
    named = (recipe.checkpoint.upload, recipe.weights.log, recipe.model.name)
    store = next((url for url in named if re.match("(s3|gs|hf)://", url or "")), "")
    if store and not (to_networks or policy["hub"]["enabled"] or policy.get("extraEgress")):
        who = "trainer" if values["trainer"]["enabled"] else "actors"
        fix = f"is empty, so that the {who} would not reach {store} while networkPolicy.hub.enabled is false; add a rule to"
        yield FieldError("networkPolicy.extraEgress", [], f"{fix} the store's address {_ALLOWED}")
