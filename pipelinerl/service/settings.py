"""Settings of a run's processes, from environment variables `PIPELINERL_<FIELD>`. This module also reads and writes `host:port`
texts and the address file, in which a process reports its ports."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from pipelinerl.errors import ServiceError, UserError
from pipelinerl.run_dir import write_json

Settings = TypeVar("Settings", bound=BaseSettings)


def read_settings(kind: type[Settings]) -> Settings:
    """Read settings from the environment. Raises `UserError` with each wrong variable, its value and the problem."""
    from_environment: Callable[[], Settings] = kind
    try:
        return from_environment()
    except ValidationError as error:
        lines = ["settings of this service are missing or wrong:"]
        for details in error.errors(include_url=False):
            name = kind.model_config.get("env_prefix", "") + "_".join(map(str, details["loc"])).upper()
            problem = "is not set" if details["type"] == "missing" else f"= {details['input']!r}: {details['msg']}"
            lines.append(f"  - {name} {problem}")
        raise UserError("\n".join(lines)) from error


class StreamsSettings(BaseSettings):
    """Access to a run's streams for a command that names neither a server nor a folder. A run's pods set these variables."""

    model_config = SettingsConfigDict(env_prefix="PIPELINERL_", frozen=True, extra="ignore")

    run: str = Field("", description="Name of the run.")
    nats_url: str = Field("", description="NATS servers of the run, separated by commas; empty = none is known.")
    nats_credentials: Path | None = Field(None, description="File with `user:password` or a NATS .creds file.")
    nats_tls_dir: Path | None = None
    """Folder with ca.crt, and with tls.crt and tls.key if the server asks for a certificate. None = trust the
    machine's own CAs, for a tls:// address."""


class ServiceSettings(BaseSettings):
    model_config = StreamsSettings.model_config

    run: str = Field(description="Name of the run, with which its NATS subjects begin.")
    recipe: Path = Field(description="File with the resolved recipe, in YAML.")
    instance: str = Field(description="Name of this process in the run: actor-0, or the pod's name.")
    grpc_host: str = Field("127.0.0.1", description="Interface of the gRPC server.")
    grpc_port: int = Field(0, ge=0, le=65535, description="Port for gRPC; 0 = any free one, named in the address file.")
    http_host: str = Field("127.0.0.1", description="Interface of /healthz, /readyz and /metrics.")
    http_port: int = Field(0, ge=0, le=65535, description="Port for HTTP; 0 = any free one, named in the address file.")
    advertise_host: str = Field("127.0.0.1", description="Name or address under which other services reach this one.")
    address_file: Path | None = Field(None, description="File that this process writes once it serves: JSON {grpc, http, pid}.")
    log_format: Literal["text", "json"] = Field("text", description="Format of the log; json in a cluster.")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    tls_dir: Path | None = None
    """Folder with tls.crt, tls.key and ca.crt, with which both sides of gRPC identify themselves. None = plain text."""


class BusSettings(ServiceSettings, StreamsSettings):
    nats_url: str = Field("nats://127.0.0.1:4222", description="NATS servers of the run, separated by commas.")


class PolicySettings(BusSettings):
    """Settings that the actor and the trainer share."""

    model_dir: str = Field("", description="Folder of the initial policy; empty = as in the recipe (`model`).")
    model_cache: Path | None = None
    """Folder into which services.trainer.initial_model or services.actor.initial_model puts a model of source `checkpoint` or
    `smollm2` before the service starts. Not used with model_dir or other sources. None = these two sources need model_dir."""
    gpu_turn: Path | None = Field(None, description="File whose lock says which process uses the GPU, with `actor.colocate`.")


class ActorSettings(PolicySettings):
    verifier: str = Field(description="host:port of the verifier, or dns:///name:port to use all addresses of a name.")
    pod_uid: str = Field("", description="uid of this pod; empty = not on Kubernetes, or not reported.")
    trainer: str = Field("", description="host:port of the trainer, which sends the initial policy if the run built one.")
    reachable: bool = True
    """True if the trainer can call this actor. Otherwise, the actor gets no evaluation requests and no parity probes."""
    episode_host: str = "127.0.0.1"
    """Interface on which the actor serves the requests of environments and agents for turns."""
    episode_port: int = Field(0, ge=0, le=65535, description="Port for requests of turns; 0 = any free one.")


class TrainerSettings(PolicySettings):
    run_dir: Path = Field(description="Folder of the run, for metrics.jsonl, samples.jsonl, checkpoints and so on.")
    expected_actors: int = Field(1, ge=0, description="Number of actors to wait for before the first step of the run.")
    stop_checkpoint_s: float = Field(3600.0, gt=0)
    """Maximum seconds that a stopping trainer may take to finish its step and write a checkpoint. After that time, it ends
    without the checkpoint. Kubernetes must wait longer than that before it kills the trainer."""
    linger: bool = False
    """Stay up after the run's end until a signal, because a StatefulSet restarts a process that exits."""
    on_completion: Literal["keep", "release", "exit"] = "keep"
    """What the trainer does with a finished run's pods (chart value trainer.onCompletion), unless the field `release` is empty.
    `keep`: it leaves all running. `release`: it scales the actors to zero, stores the report in a Secret, and scales itself to
    zero. `exit`: like `release`, but without the Secret."""
    release: str = Field("", description="Prefix of the names of this release's objects; empty = without the Kubernetes API.")
    page: bool = False
    """Serve the live page at http_port. Without page_key, anyone who can reach it can read prompts and completions."""
    page_hosts: str = ""
    """Host names, separated by commas, by which browsers may open the live page, besides advertise_host and localhost."""
    page_key: Path | None = Field(None, description="File with the secret first part of the live page's path. None = no key.")
    pod_namespace: str = Field("", description="Kubernetes namespace of this pod; empty = do not use the API.")
    service_account_dir: Path = Field(Path("/var/run/secrets/kubernetes.io/serviceaccount"))
    """Folder with the API token and the ca.crt that Kubernetes gives this pod."""
    actor_selector: str = Field("", description="Labels of the actors' pods, in the form of `kubectl get pods -l`.")
    actor_tls_name: str = Field("", description="Name in the actors' certificates; the trainer calls by IP address.")
    stream_replicas: int = Field(1, ge=1, le=5, description="Number of NATS servers that keep each stream.")
    sequences_max_gib: float = Field(8.0, gt=0, description="Maximum size of the SEQUENCES stream, GiB.")
    weights_max_gib: float = Field(8.0, gt=0, description="Maximum size of a weight log in NATS, GiB.")
    transfer_host: str = Field("127.0.0.1", min_length=1, description="Interface of the rendezvous store of transfer groups.")
    transfer_port: int = Field(0, ge=0, le=65535, description="Port of the rendezvous store; 0 = any free one.")
    nodes: int = Field(1, ge=1, description="Number of the trainer's pods, each of which starts its own ranks.")
    node: int = Field(0, ge=0, description="Index of this pod among the trainer's pods; node 0 has rank 0.")
    ranks_per_node: int = Field(0, ge=0, description="Number of ranks that a node starts, one per GPU; 0 = as in the recipe.")
    rendezvous: str = Field("", description="host:port of node 0, through which the ranks of several nodes connect.")
    revision: str = Field("", description="Revision of the pods' template. Nodes of different revisions do not train together.")


class RankSettings(BaseSettings):
    """A rank's position, from torchrun's variables. A process that torchrun did not start is the only rank."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    rank: int = Field(0, ge=0, description="Index of this rank among all ranks of the trainer.")
    world_size: int = Field(1, ge=1, description="Number of ranks of the trainer.")
    local_rank: int = Field(0, ge=0, description="Index of this rank among the ranks of its node, and index of its GPU.")
    rank_folder: Path | None = None
    """Folder through which the ranks of a single node connect; None = they use torchrun's MASTER_ADDR."""


class VerifierSettings(ServiceSettings):
    workers: int = Field(2, ge=1, le=256, description="Number of processes that compute rewards.")
    max_queue: int = Field(4096, ge=1, description="Maximum number of waiting items; more are refused with RESOURCE_EXHAUSTED.")
    private_dir: Path | None = Field(None, description="Folder that sandboxed code cannot read, such as runs/.")
    max_episodes: int = Field(512, ge=1, le=100_000, description="Maximum number of running episodes; more are refused.")
    reward_modules: Path | None = Field(None, description="Folder in which workers look for modules first, before PYTHONPATH.")


class ServiceAddress(BaseModel, frozen=True):
    """Addresses of a service, as `host:port`, and the id of the process that listens there."""

    grpc: str
    http: str
    pid: int


def host_port(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """Split `host:port`. Raises `ValueError` for a text without a port."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def announce(settings: ServiceSettings, grpc_port: int, http_port: int) -> ServiceAddress:
    """Return the addresses at which others reach this process, and write them to `settings.address_file`, if any."""
    host = settings.advertise_host
    address = ServiceAddress(grpc=host_port(host, grpc_port), http=host_port(host, http_port), pid=os.getpid())
    if settings.address_file is not None:
        write_json(settings.address_file, address.model_dump())
    return address


def read_address(path: Path) -> ServiceAddress:
    """Read an address file. Raises `ServiceError` if it is absent or invalid."""
    try:
        return ServiceAddress.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ServiceError(f"address file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ServiceError(f"address file {path} does not hold {{grpc, http, pid}}: {error!r}") from error
