"""The mini cluster itself, where it could lie: what must fail in a real cluster fails here, and what a pod sees is right."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.chart.rendering import Object, Rendered
from tests.cluster.cluster import Cluster, mini_cluster
from tests.cluster.images import USER, Image
from tests.cluster.objects import ClusterError
from tests.cluster.pod import Pod

NAMESPACE = "test"
IMAGES = {"tool": Image(user=USER, group=USER, init=True, absent=("slee*",)), "plain": Image(user=0)}
RESTRICTED = {"runAsNonRoot": True, "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False}

Start = Callable[..., AbstractAsyncContextManager[Cluster]]


def container(*command: str, **more: Any) -> Object:
    """One of the `tool` image that runs a command, or the shell script that is its only word."""
    arguments = list(command) if len(command) > 1 else ["sh", "-c", *command]
    return {"name": "main", "image": "registry.example/tool:1", "args": arguments, **more}


def pod(*containers: Object, name: str = "p", **spec: Any) -> Object:
    """One that runs once, unless told otherwise."""
    plain = {"restartPolicy": "Never", "automountServiceAccountToken": False, "enableServiceLinks": False}
    whole = {**plain, "containers": list(containers), **spec}
    return {"kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": whole}


def made(kind: str, name: str, **content: Any) -> Object:
    return {"kind": kind, "metadata": {"name": name}, **content}


@pytest.fixture
def cluster_of(kernel: None, tmp_path: Path) -> Start:
    @asynccontextmanager
    async def start(*objects: Object) -> AsyncIterator[Cluster]:
        async with mini_cluster(tmp_path / "cluster", Rendered(list(objects)), NAMESPACE, IMAGES) as cluster:
            cluster.start()
            yield cluster

    return start


async def ended(cluster: Cluster, name: str = "p") -> Pod:
    await cluster.until(lambda: cluster.pods[name].finished, 20, f"{name} ends")
    return cluster.pods[name]


async def output_of(cluster: Cluster, name: str = "p") -> str:
    found = await ended(cluster, name)
    assert found.phase == "Succeeded", found.logs()
    return found.containers["main"].logs()


async def test_a_container_sees_its_image_and_volumes_and_nothing_else(cluster_of: Start, tmp_path: Path) -> None:
    (tmp_path / "of-the-machine").write_text("secret")
    script = f"id -u; id -G; ls -A / /home {tmp_path} /usr/bin/slee* 2>/dev/null; grep CapBnd /proc/self/status; env"
    context = RESTRICTED | {"runAsUser": USER, "capabilities": {"drop": ["ALL"]}}
    async with cluster_of(pod(container(script, securityContext=context), securityContext={"fsGroup": 20000})) as cluster:
        lines = (await output_of(cluster)).splitlines()
    assert lines[:2] == [str(USER), f"{USER} 20000"]
    assert "of-the-machine" not in lines
    assert "/usr/bin/sleep" not in lines, "a program that the image has not"
    assert [line.split()[1] for line in lines if line.startswith("CapBnd")] == ["0" * 16]
    names = {line.partition("=")[0] for line in lines if "=" in line}
    kubernetes = {name for name in names if name.startswith("KUBERNETES_")}
    assert names - kubernetes == {"HOME", "HOSTNAME", "PATH", "PYTHONPATH", "PWD"}  # the shell adds PWD


@pytest.mark.parametrize("read_only", [True, False])
async def test_a_root_is_the_containers_own_and_as_read_only_as_it_says(cluster_of: Start, read_only: bool) -> None:
    paths = ["/x", "/tmp/x", "/usr/x", "/etc/x", "/var/lib/x"]
    context = {"readOnlyRootFilesystem": read_only, "runAsUser": 0}
    script = f"for path in {' '.join(paths)}; do touch $path 2>/dev/null && echo $path; done; true"
    async with cluster_of(pod(container(script, securityContext=context))) as cluster:
        assert (await output_of(cluster)).splitlines() == ([] if read_only else paths)
    assert not any(os.path.exists(path) for path in paths)


async def test_volumes_have_the_content_and_the_owners_of_the_kubelet(cluster_of: Start) -> None:
    """A claim belongs to root, so that a pod without fsGroup cannot write to it."""
    volumes = [
        {"name": "config", "configMap": {"name": "c"}},
        {"name": "secret", "secret": {"secretName": "s", "items": [{"key": "k", "path": "a/b"}]}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "d"}},
    ]
    names = ("config", "secret", "scratch", "data")
    mounts = [{"name": name, "mountPath": f"/run/{name}"} for name in names]
    script = (
        "cd /run; cat config/x.yaml secret/a/b; stat -L -c '%a %u:%g' secret/a/b; touch scratch/new && ls scratch; "
        "touch config/new 2>/dev/null || echo refused; touch data/of-$0 2>/dev/null || echo refused; ls data"
    )

    def one(name: str, **context: Any) -> Object:
        main = container("sh", "-c", script, name, volumeMounts=mounts, securityContext=RESTRICTED)
        return pod(main, name=name, volumes=volumes, **context)

    async with cluster_of(
        made("ConfigMap", "c", data={"x.yaml": "x\n"}),
        made("Secret", "s", data={"k": "djEK"}),  # v1
        made("PersistentVolumeClaim", "d", spec={}),
        one("without"),
    ) as cluster:
        output = await output_of(cluster, "without")
        assert output.split("\n") == ["x", "v1", "644 0:0", "new", "refused", "refused", ""]
        cluster.create(one("with", securityContext={"fsGroup": 300}))
        output = await output_of(cluster, "with")
        assert output.split("\n") == ["x", "v1", "644 0:300", "new", "refused", "of-with", ""]
        await cluster.delete("with")
        cluster.create(one("with", securityContext={"fsGroup": 300}))
        assert (await output_of(cluster, "with")).endswith("of-with\n"), "a claim outlives its pod"


async def test_environment_and_arguments_are_resolved_as_the_kubelet_does(cluster_of: Start) -> None:
    variables = [
        {"name": "PLAIN", "value": "a"},
        {"name": "REFERS", "value": "$(PLAIN)-$(LATER)-$$(PLAIN)"},
        {"name": "LATER", "value": "b"},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ]
    names = [variable["name"] for variable in variables]
    script = "import json, os, sys; print(json.dumps([os.environ.get(n) for n in sys.argv[2:]] + [sys.argv[1]]))"
    main = container(*("python", "-c", script, "$(POD_NAME)/$(NOBODY)", *names), env=variables)
    secret = made("Secret", "s", data={"k": "b2YtdGhlLXNlY3JldA=="})
    async with cluster_of(secret, pod(main)) as cluster:
        seen = json.loads(await output_of(cluster))
    assert seen == ["a", "a-$(LATER)-$(PLAIN)", "b", "p", "p", "of-the-secret", "p/$(NOBODY)"]


QUICK = {"periodSeconds": 0.1, "failureThreshold": 2}
PORTS = [{"name": "http", "containerPort": 8080}]
SERVER = """
import http.server, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if os.path.exists(self.path) else 503)
        self.end_headers()
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
"""
HERE = {"periodSeconds": 0.1, "failureThreshold": 150, "httpGet": {"path": "/tmp", "port": "http"}}
NOWHERE = QUICK | {"httpGet": {"path": "/no-such-file", "port": "http"}}


def server(**more: Any) -> Object:
    return container("python", "-c", SERVER, ports=PORTS, **more)


def volume(**source: Any) -> dict[str, Any]:
    return {"volumes": [{"name": "v", **source}]}


NO_KEY = {"secretKeyRef": {"name": "s", "key": "no"}}
STAYS = {"restartPolicy": "Always", "terminationGracePeriodSeconds": 5}
BROKEN: dict[str, Object] = {
    "couldn't find key no in Secret s": pod(container("true", env=[{"name": "A", "valueFrom": NO_KEY}])),
    "envFrom is not modelled": pod(container("true", envFrom=[{"configMapRef": {"name": "c"}}])),
    "links to Services are not modelled": pod(container("true"), enableServiceLinks=True),
    'secret "no" not found': pod(container("true"), **volume(secret={"secretName": "no"})),
    "non-existent Secret key: no of s": pod(
        container("true"), **volume(secret={"secretName": "s", "items": [{"key": "no", "path": "x"}]})
    ),
    "volumeMounts: not found": pod(container("true", volumeMounts=[{"name": "no", "mountPath": "/x"}])),
    'persistentvolumeclaim "no" not found': pod(container("true"), **volume(persistentVolumeClaim={"claimName": "no"})),
    "no such image": pod(container("true", image="nobodys:1")),
    "runAsNonRoot and image will run as root": pod(container("true", image="plain", securityContext=RESTRICTED)),
    '"no" not found': pod(container("true"), serviceAccountName="no", automountServiceAccountToken=True),
    "init container i": pod(container("true"), initContainers=[container("exit 3") | {"name": "i"}]),
    r"ended with \[7(, 7)*\], [1-9] times for a probe": pod(server(startupProbe=HERE, livenessProbe=NOWHERE), **STAYS),
    "no container port named 'htpp'": pod(server(readinessProbe={"httpGet": {"path": "/", "port": "htpp"}}), **STAYS),
    "a probe with .'exec'. is not modelled": pod(server(livenessProbe={"exec": {}}), **STAYS),
    r"ended with \[4(, 4)*\]": pod(container("exit 4"), **STAYS),
}


@pytest.mark.parametrize("message", BROKEN)
async def test_a_pod_that_would_not_start_or_not_stay_fails_what_waits_for_it(cluster_of: Start, message: str) -> None:
    async with cluster_of(made("Secret", "s", data={"k": "dg=="}), BROKEN[message]) as cluster:
        with pytest.raises(ClusterError, match=message):
            await cluster.until(lambda: False, 60, "for ever")


async def test_a_container_that_never_gets_ready_is_not_ready(cluster_of: Start) -> None:
    async with cluster_of(pod(server(readinessProbe=NOWHERE), **STAYS)) as cluster:
        with pytest.raises(ClusterError, match="not within 1 s: it is ready"):
            await cluster.until(lambda: cluster.pods["p"].ready, 1, "it is ready")


async def test_a_container_is_started_again_and_ended_in_order_within_its_grace_period(cluster_of: Start) -> None:
    """preStop, SIGTERM, and SIGKILL to all that is in it; nothing of the cluster is left on the machine."""
    obeys = container("trap 'echo term; exit 5' TERM; while :; do tail -f /dev/null -s 0.05 & wait; done")
    obeys |= {"lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}
    ignores = container("trap '' TERM; tail -f /dev/null -s 1234567 & while :; do wait; done") | {"name": "other"}
    async with cluster_of(pod(obeys, ignores, restartPolicy="Always", terminationGracePeriodSeconds=4)) as cluster:
        cluster.strict = False
        await cluster.until(lambda: bool(running(b"1234567")), 60, "it runs")
        os.kill(cluster.pods["p"].containers["other"].pid or 0, signal.SIGKILL)
        await cluster.until(lambda: cluster.pods["p"].restarts == 1, 60, "it is started again")
        await cluster.until(lambda: bool(running(b"1234567")), 60, "it runs")
        gone = await cluster.delete("p")
        assert gone.containers["main"].exit_codes == [5]
        assert gone.containers["other"].exit_codes == [1, 1]
        assert gone.containers["main"].logs() == "term\n"
        assert not running(b"1234567")
        folder = str(cluster.folder)
    assert folder not in Path("/proc/mounts").read_text()


def running(word: bytes) -> list[bytes]:
    """Command lines of this machine's processes with a word in them; shells that were told to start one left out."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_bytes())
        except OSError:  # ended meanwhile
            continue
    return [line for line in lines if word in line.split(b"\0")]


def headless(name: str, selects: str) -> Object:
    return made("Service", name, spec={"clusterIP": "None", "selector": {"app": selects}, "ports": [{"port": 80}]})


async def resolved(cluster: Cluster, name: str) -> list[str] | None:
    """By a pod of its own, with the C library."""
    script = (
        "import json, socket, sys; family = socket.AF_INET; "
        "print(json.dumps(sorted({a[4][0] for a in socket.getaddrinfo(sys.argv[1], 80, family)})))"
    )
    asker = f"ask-{len(cluster.gone)}"
    cluster.create(pod(container("python", "-c", script, name), name=asker))
    found = await ended(cluster, asker)
    await cluster.delete(asker)
    return json.loads(found.logs().partition("\n")[2]) if found.phase == "Succeeded" else None


async def test_a_headless_service_resolves_to_its_ready_pods_as_they_come_and_go(cluster_of: Start) -> None:
    spec = {"containers": [server(readinessProbe=HERE)], "terminationGracePeriodSeconds": 2, "enableServiceLinks": False}
    template = {"metadata": {"labels": {"app": "s"}}, "spec": spec}
    async with cluster_of(
        made("Deployment", "s", spec={"replicas": 2, "template": template}), headless("headless", "s"), headless("nobody", "x")
    ) as cluster:
        await cluster.until(lambda: [one.ready for one in cluster.pods.values()] == [True, True], 60, "two are ready")
        addresses = sorted(one.ip for one in cluster.pods.values())
        for name in ("headless", f"headless.{NAMESPACE}", f"headless.{NAMESPACE}.svc.cluster.local"):
            assert await resolved(cluster, name) == addresses
        cluster.scale("s", 1)
        (left,) = [one for one in cluster.pods.values() if not one.deleting]
        assert await resolved(cluster, "headless") == [left.ip]
        assert await resolved(cluster, "nobody") is None
        assert await resolved(cluster, "example.com") is None


CALL = """
import json, os, ssl, sys, urllib.request, urllib.error
folder = "/var/run/secrets/kubernetes.io/serviceaccount/"
context = ssl.create_default_context(cafile=folder + "ca.crt")
def call(method, path, body=None, kind="application/merge-patch+json"):
    url = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}" + path
    headers = {"Authorization": "Bearer " + open(folder + "token").read(), "Content-Type": kind}
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers, method=method)
    try:
        return json.load(urllib.request.urlopen(request, context=context))
    except urllib.error.HTTPError as error:
        return error.code
ns = "/api/v1/namespaces/" + open(folder + "namespace").read()
print(call("GET", ns + "/pods/p")["metadata"]["uid"])
print(call("GET", ns + "/pods"), call("GET", "/api/v1/namespaces/other/pods/p"))
scale = ns.replace("/api/v1", "/apis/apps/v1") + "/deployments/NAME/scale"
for path, part in ((ns + "/configmaps/NAME", {"data": {"phase": "Done"}}), (scale, {"spec": {"replicas": 0}})):
    print(*(call("PATCH", path.replace("NAME", name), part) for name in ("mine", "theirs")))
"""


async def test_the_api_answers_what_the_roles_permit_and_refuses_the_rest(cluster_of: Start) -> None:
    named = {"verbs": ["patch"], "resourceNames": ["mine"]}
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["configmaps"], **named},
        {"apiGroups": ["apps"], "resources": ["deployments/scale"], **named},
    ]
    subjects = [{"kind": "ServiceAccount", "name": "a", "namespace": NAMESPACE}]
    async with cluster_of(
        made("ServiceAccount", "a"),
        made("Role", "r", rules=rules),
        made("RoleBinding", "b", roleRef={"kind": "Role", "name": "r"}, subjects=subjects),
        pod(container("python", "-c", CALL), serviceAccountName="a", automountServiceAccountToken=True),
    ) as cluster:
        for objects in (cluster.api.configs, cluster.api.scales):
            objects |= {"mine": {}, "theirs": {}}
        with pytest.raises(ClusterError, match="cannot list resource"):
            await cluster.until(lambda: False, 60, "for ever")
        cluster.strict = False
        lines = (await output_of(cluster)).splitlines()
        assert lines[:2] == [cluster.pods["p"].uid, "403 403"]
        assert [line.rpartition(" ")[2] for line in lines[2:]] == ["403", "403"], "by name"
        assert (cluster.api.configs, cluster.api.scales) == (
            {"mine": {"phase": "Done"}, "theirs": {}},
            {"mine": {"replicas": 0}, "theirs": {}},
        )
        words = [denied.split() for denied in cluster.api.denied]
        assert {one[1] for one in words} == {f'"system:serviceaccount:{NAMESPACE}:a"'}
        assert [" ".join(one[2:4]) for one in words] == ["cannot list", "cannot get", *["cannot patch"] * 2]
