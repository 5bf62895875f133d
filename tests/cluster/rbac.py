"""What a ServiceAccount may do, from the rendered Roles and RoleBindings. Pure.

Namespaced and cluster roles by their rules; aggregation, groups and users are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.cluster.objects import Objects


@dataclass(frozen=True)
class Access:
    """One call to the API: `resource` may be a subresource such as pods/log; `name` is empty for list, watch and create."""

    verb: str
    group: str
    resource: str
    name: str = ""


def allowed(objects: Objects, namespace: str, account: str, access: Access) -> bool:
    return any(_permits(rule, access) for rule in _rules_of(objects, namespace, account))


def denial(namespace: str, account: str, access: Access) -> str:
    """The API server's words."""
    return (
        f'User "system:serviceaccount:{namespace}:{account}" cannot {access.verb} resource "{access.resource}" '
        f'in API group "{access.group}" in the namespace "{namespace}"'
    )


def _rules_of(objects: Objects, namespace: str, account: str) -> Iterator[Mapping[str, Any]]:
    for binding in objects.of("RoleBinding", "ClusterRoleBinding"):
        if not any(_is_account(subject, namespace, account) for subject in binding.get("subjects") or []):
            continue
        role = objects.find(binding["roleRef"]["kind"], binding["roleRef"]["name"])
        yield from (role or {}).get("rules") or []


def _is_account(subject: Mapping[str, Any], namespace: str, account: str) -> bool:
    return (
        subject["kind"] == "ServiceAccount"
        and subject["name"] == account
        and subject.get("namespace", namespace) == namespace
    )


def _permits(rule: Mapping[str, Any], access: Access) -> bool:
    names = rule.get("resourceNames") or []
    return (
        _has(rule.get("verbs"), access.verb)
        and _has(rule.get("apiGroups"), access.group)
        and _has(rule.get("resources"), access.resource)
        and (not names or access.name in names)
    )


def _has(values: list[str] | None, wanted: str) -> bool:
    return wanted in (values or []) or "*" in (values or [])


def mounts_token(objects: Objects, pod: Mapping[str, Any]) -> bool:
    """Whether a pod gets its ServiceAccount's token: the pod's word counts, else the account's, else yes."""
    own = pod["spec"].get("automountServiceAccountToken")
    if own is not None:
        return bool(own)
    account = objects.find("ServiceAccount", account_of(pod))
    return bool((account or {}).get("automountServiceAccountToken", True))


def account_of(pod: Mapping[str, Any]) -> str:
    return pod["spec"].get("serviceAccountName") or "default"
