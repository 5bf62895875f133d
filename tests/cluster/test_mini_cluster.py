"""The mini cluster itself, where it could lie: what must fail in a real cluster fails here, and what a pod sees is right."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import DELETION_COST, Cluster, mini_cluster
from tests.cluster.images import USER, Image, product_images
from tests.cluster.objects import ClusterError, Object, Objects
from tests.cluster.pod import Pod

NAMESPACE = "test"
IMAGES = {"tool": Image(user=USER, group=USER, init=True), "plain": Image(user=0)}
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
        async with mini_cluster(tmp_path / "cluster", Objects(list(objects)), NAMESPACE, IMAGES) as cluster:
            cluster.start()
            yield cluster

    return start


async def ended(cluster: Cluster, name: str = "p") -> Pod:
    await cluster.until(lambda: cluster.pods[name].finished, 20, f"{name} ends")
    return cluster.pods[name]


async def output_of(cluster: Cluster, name: str = "p") -> str:
    found = await ended(cluster, name)
    assert found.phase == "Succeeded", found.logs()
    return found.containers["main"].process.logs()


async def test_a_container_sees_its_image_and_volumes_and_nothing_else(cluster_of: Start, tmp_path: Path) -> None:
    (tmp_path / "of-the-machine").write_text("secret")
    script = f"id -u; id -G; ls -A / /home {tmp_path} 2>/dev/null; grep CapBnd /proc/self/status; env"
    context = RESTRICTED | {"runAsUser": USER, "capabilities": {"drop": ["ALL"]}}
    async with cluster_of(
        pod(container(script, securityContext=context), securityContext={"fsGroup": 20000})
    ) as cluster:
        lines = (await output_of(cluster)).splitlines()
    assert lines[:2] == [str(USER), f"{USER} 20000"]
    assert "of-the-machine" not in lines
    assert [line.split()[1] for line in lines if line.startswith("CapBnd")] == ["0" * 16]
    names = {line.partition("=")[0] for line in lines if "=" in line}
    kubernetes = {name for name in names if name.startswith("KUBERNETES_")}
    assert names - kubernetes == {"HOME", "HOSTNAME", "PATH", "PYTHONPATH", "PWD"}  # the shell adds PWD


@pytest.mark.parametrize("path", ["/x", "/tmp/x", "/usr/x", "/etc/x", "/var/lib/x"])
async def test_a_read_only_root_cannot_be_written_to(cluster_of: Start, path: str) -> None:
    context = {"readOnlyRootFilesystem": True, "runAsUser": 0}
    async with cluster_of(pod(container(f"touch {path}", securityContext=context))) as cluster:
        found = await ended(cluster)
    assert found.phase == "Failed"
    assert "Read-only file system" in found.logs()
    assert not os.path.exists(path)


async def test_a_writable_root_is_the_containers_own(cluster_of: Start) -> None:
    context = {"runAsUser": 0}
    async with cluster_of(pod(container("touch /x /usr/x && ls /x", securityContext=context))) as cluster:
        assert await output_of(cluster) == "/x\n"
    assert not os.path.exists("/x")
    assert not os.path.exists("/usr/x")


async def test_volumes_have_the_content_the_owners_and_the_modes_of_the_kubelet(cluster_of: Start) -> None:
    volumes = [
        {"name": "config", "configMap": {"name": "c"}},
        {"name": "secret", "secret": {"secretName": "s", "defaultMode": 0o400, "items": [{"key": "k", "path": "a/b"}]}},
        {"name": "scratch", "emptyDir": {}},
    ]
    mounts = [
        {"name": "config", "mountPath": "/etc/thing"},
        {"name": "secret", "mountPath": "/etc/thing-secret"},
        {"name": "scratch", "mountPath": "/tmp"},
    ]
    script = (
        "cat /etc/thing/x.yaml /etc/thing-secret/a/b; stat -L -c '%a %u:%g' /etc/thing-secret/a/b /etc/thing/x.yaml; "
        "touch /tmp/new && ls /tmp; touch /etc/thing/new || echo refused"
    )
    async with cluster_of(
        made("ConfigMap", "c", data={"x.yaml": "x\n"}),
        made("Secret", "s", data={"k": "djEK"}),  # v1
        pod(
            container(script, volumeMounts=mounts, securityContext=RESTRICTED),
            volumes=volumes,
            securityContext={"fsGroup": 300},
        ),
    ) as cluster:
        output = await output_of(cluster)
    expected = ["x", "v1", "440 0:300", "644 0:300", "new"]
    assert [line for line in output.splitlines() if "touch" not in line] == [*expected, "refused"]


async def test_a_claim_outlives_its_pod_and_belongs_to_root_without_fs_group(cluster_of: Start) -> None:
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "d"}}]
    mounts = [{"name": "data", "mountPath": "/data"}]
    claim = made("PersistentVolumeClaim", "d", spec={})
    writer = pod(
        container("echo 1 > /data/x", volumeMounts=mounts), name="w", volumes=volumes, securityContext={"fsGroup": 300}
    )
    stranger = pod(container("echo 2 > /data/y", volumeMounts=mounts), name="x", volumes=volumes)
    async with cluster_of(claim, stranger) as cluster:
        assert (await ended(cluster, "x")).phase == "Failed"
        cluster.create(writer)
        await output_of(cluster, "w")
        await cluster.delete("w")
        reader = pod(container("cat /data/x", volumeMounts=mounts), name="r", volumes=volumes)
        cluster.create(reader)
        assert await output_of(cluster, "r") == "1\n"


VARIABLES = [
    {"name": "PLAIN", "value": "a"},
    {"name": "REFERS", "value": "$(PLAIN)-$(LATER)-$$(PLAIN)"},
    {"name": "LATER", "value": "b"},
    {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
    {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
]


async def test_environment_and_arguments_are_resolved_as_the_kubelet_does(cluster_of: Start) -> None:
    names = ["PLAIN", "REFERS", "LATER", "POD_NAME", "APP", "KEY"]
    script = "import json, os, sys; print(json.dumps([{n: os.environ.get(n) for n in sys.argv[2:]}, sys.argv[1]]))"
    main = container(*("python", "-c", script, "$(POD_NAME)/$(NOBODY)", *names), env=VARIABLES)
    secret = made("Secret", "s", data={"k": "b2YtdGhlLXNlY3JldA=="})
    async with cluster_of(secret, pod(main)) as cluster:
        environment, argument = json.loads(await output_of(cluster))
    values = ["a", "a-$(LATER)-$(PLAIN)", "b", "p", "p", "of-the-secret"]
    assert environment == dict(zip(names, values, strict=True))
    assert argument == "p/$(NOBODY)"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            pod(container("true", env=[{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "no"}}}])),
            "couldn't find key no in Secret s",
        ),
        (pod(container("true", envFrom=[{"configMapRef": {"name": "c"}}])), "envFrom is not modelled"),
        (pod(container("true"), enableServiceLinks=True), "links to Services are not modelled"),
        (pod(container("true"), volumes=[{"name": "v", "secret": {"secretName": "no"}}]), 'secret "no" not found'),
        (
            pod(
                container("true"),
                volumes=[{"name": "v", "secret": {"secretName": "s", "items": [{"key": "no", "path": "x"}]}}],
            ),
            "non-existent secret key: no of s",
        ),
        (pod(container("true", volumeMounts=[{"name": "no", "mountPath": "/x"}])), "volumeMounts: not found"),
        (
            pod(container("true"), volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "no"}}]),
            'persistentvolumeclaim "no" not found',
        ),
        (pod(container("true", image="nobodys:1")), "no such image"),
        (pod(container("true", image="plain", securityContext=RESTRICTED)), "runAsNonRoot and image will run as root"),
        (pod(container("true"), serviceAccountName="no", automountServiceAccountToken=True), '"no" not found'),
        (pod(container("true"), initContainers=[container("exit 3") | {"name": "i"}]), "init container i"),
    ],
)
async def test_a_pod_that_a_cluster_would_not_start_fails_what_waits_for_it(
    cluster_of: Start, broken: Object, message: str
) -> None:
    async with cluster_of(made("Secret", "s", data={"k": "dg=="}), broken) as cluster:
        with pytest.raises(ClusterError, match=message.replace("(", r"\(")):
            await cluster.until(lambda: "p" in cluster.pods and cluster.pods["p"].finished, 20, "it ends")


SERVER = """
import http.server, sys, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if os.path.exists(self.path) else 503)
        self.end_headers()
        self.wfile.write(os.environ["HOSTNAME"].encode())
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
"""
PORTS = [{"name": "http", "containerPort": 8080}]
QUICK = {"periodSeconds": 0.1, "failureThreshold": 2}


def server(**more: Any) -> Object:
    return container("python", "-c", SERVER, ports=PORTS, **more)


async def test_a_container_that_never_gets_ready_is_not_ready(cluster_of: Start) -> None:
    probe = QUICK | {"httpGet": {"path": "/no-such-file", "port": "http"}}
    async with cluster_of(pod(server(readinessProbe=probe), restartPolicy="Always")) as cluster:
        with pytest.raises(ClusterError, match="not within 2 s: it is ready"):
            await cluster.until(lambda: cluster.pods["p"].ready, 2, "it is ready")


async def test_a_container_whose_liveness_probe_fails_is_started_again_and_fails_a_strict_test(
    cluster_of: Start,
) -> None:
    probe = QUICK | {"exec": {"command": ["false"]}, "terminationGracePeriodSeconds": 5}
    main = container("trap 'exit 7' TERM; while :; do sleep 0.05; done", livenessProbe=probe)
    async with cluster_of(pod(main, restartPolicy="Always")) as cluster:
        with pytest.raises(ClusterError, match=r"ended with \[7\], 1 times for a probe"):
            await cluster.until(lambda: False, 20, "for ever")
        cluster.strict = False
        await cluster.until(lambda: cluster.pods["p"].restarts >= 1, 20, "it is started again")


async def test_a_probe_of_a_port_that_the_pod_does_not_name_fails(cluster_of: Start) -> None:
    probe = {"httpGet": {"path": "/", "port": "htpp"}}
    async with cluster_of(pod(server(readinessProbe=probe), restartPolicy="Always")) as cluster:
        with pytest.raises(ClusterError, match="no container port named 'htpp'"):
            await cluster.until(lambda: cluster.pods["p"].ready, 5, "it is ready")


async def test_a_crash_is_restarted_and_fails_a_strict_test(cluster_of: Start) -> None:
    async with cluster_of(pod(container("exit 4"), restartPolicy="Always")) as cluster:
        with pytest.raises(ClusterError, match=r"ended with \[4\]"):
            await cluster.until(lambda: False, 20, "for ever")


async def test_a_deleted_pod_gets_pre_stop_then_sigterm_and_its_exit_code_is_known(cluster_of: Start) -> None:
    mounts = [{"name": "data", "mountPath": "/data"}]
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "echo stop >> /data/log"]}}}
    script = "trap 'echo term >> /data/log; exit 5' TERM; echo up >> /data/log; while :; do sleep 0.05; done"
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": "d"}}
    main = container(script, volumeMounts=mounts, lifecycle=hook)
    whole = pod(main, volumes=[claim], restartPolicy="Always", securityContext={"fsGroup": 300})
    async with cluster_of(made("PersistentVolumeClaim", "d", spec={}), whole) as cluster:
        log = cluster.folder / "claims" / "d" / "log"
        await cluster.until(log.exists, 20, "it runs")
        gone = await cluster.delete("p")
    assert log.read_text().split() == ["up", "stop", "term"]
    assert gone.containers["main"].exit_codes == [5]


async def test_sigkill_ends_everything_in_a_container_after_the_grace_period(cluster_of: Start) -> None:
    script = "trap '' TERM; sleep 1234567 & while :; do sleep 0.05; done"
    async with cluster_of(pod(container(script), terminationGracePeriodSeconds=1)) as cluster:
        await cluster.until(lambda: bool(running(b"1234567")), 20, "it runs")
        gone = await cluster.delete("p")
        assert gone.containers["main"].exit_codes in ([137], [-9])
        assert not running(b"1234567")


def running(word: bytes) -> list[bytes]:
    """Command lines of this machine's processes with a word in them; shells that were told to start one left out."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_bytes())
        except OSError:  # ended meanwhile
            continue
    return [line for line in lines if word in line.split(b"\0")]


async def test_init_containers_run_in_order_and_sidecars_beside_the_rest(cluster_of: Start) -> None:
    mounts = [{"name": "data", "mountPath": "/data"}]
    side = server(
        restartPolicy="Always",
        startupProbe=QUICK | {"httpGet": {"path": "/tmp", "port": "http"}, "failureThreshold": 200},
    ) | {"name": "side"}
    first = container("echo first > /data/log", volumeMounts=mounts) | {"name": "first"}
    main = container(
        "python -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/tmp').status)\"; cat /data/log",
        volumeMounts=mounts,
    )
    volumes = [{"name": "data", "emptyDir": {}}]
    async with cluster_of(pod(main, initContainers=[first, side], volumes=volumes)) as cluster:
        assert await output_of(cluster) == "200\nfirst\n"
        assert cluster.pods["p"].containers["side"].exit_codes == [143]  # stopped when the last container had ended


LOOK_UP = "import socket, sys; print(sorted({a[4][0] for a in socket.getaddrinfo(sys.argv[1], 80, socket.AF_INET)}))"


def template(name: str, main: Object) -> Object:
    spec = {"containers": [main], "terminationGracePeriodSeconds": 2, "enableServiceLinks": False}
    return {"metadata": {"labels": {"app": name}}, "spec": spec}


def deployment(name: str, replicas: int, main: Object) -> Object:
    return made("Deployment", name, spec={"replicas": replicas, "template": template(name, main)})


async def resolved(cluster: Cluster, name: str) -> list[str] | None:
    """By a pod of its own, with the C library."""
    asker = f"ask-{len(cluster.gone)}"
    cluster.create(pod(container("python", "-c", LOOK_UP, name), name=asker))
    found = await ended(cluster, asker)
    await cluster.delete(asker)
    return json.loads(found.containers["main"].process.logs().replace("'", '"')) if found.phase == "Succeeded" else None


async def test_a_headless_service_resolves_to_its_ready_pods_as_they_come_and_go(cluster_of: Start) -> None:
    ready = QUICK | {"tcpSocket": {"port": "http"}}
    selector = {"app": "s"}
    async with cluster_of(
        deployment("s", 2, server(readinessProbe=ready)),
        made("Service", "headless", spec={"clusterIP": "None", "selector": selector, "ports": [{"port": 80}]}),
        made("Service", "nobody", spec={"clusterIP": "None", "selector": {"app": "x"}, "ports": [{"port": 80}]}),
    ) as cluster:
        await cluster.until(lambda: [one.ready for one in cluster.pods.values()] == [True, True], 20, "two are ready")
        addresses = sorted(one.ip for one in cluster.pods.values())
        for name in ("headless", f"headless.{NAMESPACE}", f"headless.{NAMESPACE}.svc.cluster.local"):
            assert await resolved(cluster, name) == addresses
        cluster.scale("s", 1)
        (left,) = [one for one in cluster.pods.values() if not one.deleting]
        assert await resolved(cluster, "headless") == [left.ip]
        assert await resolved(cluster, "nobody") is None
        assert await resolved(cluster, "example.com") is None


async def test_grpc_sees_every_address_of_a_headless_service(cluster_of: Start) -> None:
    script = """
import grpc, sys, time
from concurrent import futures
server = grpc.server(futures.ThreadPoolExecutor(2))
answer = grpc.unary_unary_rpc_method_handler(lambda request, context: sys.argv[1].encode())
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Who": answer}),))
server.add_insecure_port("0.0.0.0:8080"); server.start(); server.wait_for_termination()
"""
    ask = """
import grpc, json
config = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
channel = grpc.insecure_channel("dns:///many:8080", options=[("grpc.service_config", config)])
seen = set()
while len(seen) < 2:
    seen.add(channel.unary_unary("/t.T/Who")(b"", wait_for_ready=True, timeout=15))
print("both")
"""
    main = container(
        "python", "-c", script, "$(HOSTNAME)", ports=PORTS, readinessProbe=QUICK | {"tcpSocket": {"port": "http"}}
    )
    main["env"] = [{"name": "HOSTNAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    service = made("Service", "many", spec={"clusterIP": "None", "selector": {"app": "s"}, "ports": [{"port": 8080}]})
    async with cluster_of(deployment("s", 2, main), service) as cluster:
        await cluster.until(lambda: [one.ready for one in cluster.pods.values()] == [True, True], 20, "two are ready")
        cluster.create(pod(container("python", "-c", ask)))
        assert await output_of(cluster) == "both\n"


async def test_a_stateful_set_gives_names_claims_and_indices_and_a_cluster_ip_reaches_a_ready_pod(
    cluster_of: Start,
) -> None:
    probe = QUICK | {"httpGet": {"path": "/tmp", "port": "http"}}
    main = server(readinessProbe=probe, volumeMounts=[{"name": "data", "mountPath": "/data"}])
    pods = {"template": template("s", main), "volumeClaimTemplates": [made("", "data")]}
    spec = {"replicas": 1, "serviceName": "names", **pods}
    get = "import urllib.request as u; print(u.urlopen('http://front:80/tmp').read().decode())"
    async with cluster_of(
        made("StatefulSet", "s", spec=spec),
        made("Service", "names", spec={"clusterIP": "None", "selector": {"app": "s"}, "ports": [{"port": 80}]}),
        made("Service", "front", spec={"selector": {"app": "s"}, "ports": [{"port": 80, "targetPort": "http"}]}),
    ) as cluster:
        await cluster.until(lambda: cluster.pods["s-0"].ready, 20, "it is ready")
        assert await resolved(cluster, "s-0.names") == [cluster.pods["s-0"].ip]
        assert await resolved(cluster, "front") == [cluster.builder.cluster_ips["front"]]
        cluster.create(pod(container("python", "-c", get)))
        assert await output_of(cluster) == "s-0\n"
        first = cluster.pods["s-0"]
        await cluster.delete("s-0")
        await cluster.until(lambda: "s-0" in cluster.pods and cluster.pods["s-0"].ready, 20, "another one has its name")
        assert cluster.pods["s-0"].uid != first.uid
        assert [path.name for path in (cluster.folder / "claims").iterdir()] == ["data-s-0"]


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
cost = {"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": "7"}}}
print(call("PATCH", ns + "/pods/p", cost)["metadata"]["name"])
others = call("GET", "/api/v1/namespaces/other/pods/p"), call("POST", ns + "/events", {}, "application/json")
print(call("GET", ns + "/pods"), *others)
"""


async def test_the_api_answers_what_the_roles_permit_and_refuses_the_rest(cluster_of: Start) -> None:
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "patch"]}]
    subjects = [{"kind": "ServiceAccount", "name": "a", "namespace": NAMESPACE}]
    async with cluster_of(
        made("ServiceAccount", "a"),
        made("Role", "r", rules=rules),
        made("RoleBinding", "b", roleRef={"kind": "Role", "name": "r"}, subjects=subjects),
        pod(container("python", "-c", CALL), serviceAccountName="a", automountServiceAccountToken=True),
    ) as cluster:
        with pytest.raises(ClusterError, match="cannot get resource"):
            await cluster.until(lambda: False, 20, "for ever")
        cluster.strict = False
        lines = (await output_of(cluster)).splitlines()
        assert lines == [cluster.pods["p"].uid, "p", "403 403 403"]
        assert cluster.annotation(cluster.pods["p"], DELETION_COST) == "7"
        words = [denied.split() for denied in cluster.api.denied]
        assert {one[1] for one in words} == {f'"system:serviceaccount:{NAMESPACE}:a"'}
        assert [" ".join(one[2:4]) for one in words] == ["cannot get", "cannot create", "cannot list"]


async def test_scaling_down_takes_the_cheapest_pod(cluster_of: Start) -> None:
    async with cluster_of(deployment("s", 3, container("sleep", "1000"))) as cluster:
        await cluster.until(lambda: [one.ready for one in cluster.pods.values()] == [True] * 3, 20, "three are ready")
        names = list(cluster.pods)
        for name, cost in zip(names, ("5", "-1", "7"), strict=True):
            shown = cluster.api.pods[name]
            shown["metadata"]["annotations"][DELETION_COST] = cost
        cluster.scale("s", 2)
        assert [one.name for one in cluster.pods.values() if one.deleting] == [names[1]]


async def test_nothing_is_left_when_a_cluster_ends(cluster_of: Start) -> None:
    async with cluster_of(deployment("s", 2, container("sleep", "7654321"))) as cluster:
        await cluster.until(lambda: [one.ready for one in cluster.pods.values()] == [True] * 2, 20, "two are ready")
        assert running(b"7654321")
        folder = str(cluster.folder)
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if folder in line]
    assert not running(b"7654321")


def test_images_are_as_their_dockerfiles_say() -> None:
    image = product_images()["trainer"]
    assert (image.user, image.group, image.init) == (USER, USER, True)
    assert image.command(None, None) == ["python", "-m", "services.trainer"]
    assert image.command(None, ["python", "-m", "x"]) == ["python", "-m", "x"]
    assert image.environment["PYTHONUNBUFFERED"] == "1"
    assert "CC" not in image.environment
    assert product_images()["actor"].environment["TORCH_COMPILE_DISABLE"] == "1"  # of the stage that it is made from


async def test_a_program_that_the_image_has_not_is_not_there(kernel: None, tmp_path: Path) -> None:
    images = {"tool": Image(init=True, absent=("slee*",))}
    async with mini_cluster(tmp_path / "cluster", Objects(), NAMESPACE, images) as cluster:
        cluster.create(pod(container("ls /usr/bin/env /usr/bin/sleep")))
        found = await ended(cluster)
    assert found.logs().splitlines()[1:] == [
        "ls: cannot access '/usr/bin/sleep': No such file or directory",
        "/usr/bin/env",
    ]
    assert Path("/usr/bin/sleep").exists()
