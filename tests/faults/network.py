"""A network of this machine's own: members in network namespaces on one bridge, whose cables can be pulled.

Linux, root and iproute2 only. Nothing leaves the machine: the bridge has no route to anywhere.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_NUMBERS = itertools.count(1)


def why_not_here() -> str:
    """Why no such network can be made here; empty when it can."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs iproute2 (`ip`)"
    try:
        with private_network():
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.decode().strip()}"


@dataclass
class PrivateNetwork:
    """`host`: this process's address on it. Addresses are of 10.213.0.0/16, one /24 a network."""

    name: str
    subnet: str
    namespaces: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(2), repr=False)

    @property
    def host(self) -> str:
        return f"{self.subnet}.1"

    def add(self) -> Place:
        """A new namespace with an address, connected to the others and to this process."""
        number = next(self._numbers)
        place = Place(f"{self.name}-{number}", f"{self.subnet}.{number}", f"{self.name}v{number}")
        self.namespaces.append(place.namespace)
        _ip("netns", "add", place.namespace)
        _ip("link", "add", place.cable, "type", "veth", "peer", "name", "eth0", "netns", place.namespace)
        _ip("link", "set", place.cable, "master", self.name, "up")
        _ip("-n", place.namespace, "addr", "add", f"{place.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", place.namespace, "link", "set", device, "up")
        return place

    def remove(self, place: Place) -> None:
        self.namespaces.remove(place.namespace)
        _ip("netns", "del", place.namespace)

    def answer_at(self, address: str) -> None:
        _ip("addr", "add", f"{address}/24", "dev", self.name)


@dataclass(frozen=True)
class Place:
    """Where a member's process lives."""

    namespace: str
    address: str
    cable: str

    def cut(self) -> None:
        """Packets vanish both ways, as when a switch dies: nobody is told."""
        _ip("link", "set", self.cable, "down")

    def mend(self) -> None:
        _ip("link", "set", self.cable, "up")


@contextmanager
def private_network() -> Iterator[PrivateNetwork]:
    """Removes the namespaces and the bridge at the end, and with them their cables."""
    network = PrivateNetwork(f"prl{os.getpid() % 100000}{next(_NUMBERS)}", _free_subnet())
    # An address of its own: a bridge otherwise takes the least of its cables', and is lost for seconds when that changes.
    _ip("link", "add", network.name, "address", "02:00:00:00:00:01", "type", "bridge")
    try:
        _ip("addr", "add", f"{network.host}/24", "dev", network.name)
        _ip("link", "set", network.name, "up")
        yield network
    finally:
        for namespace in network.namespaces:
            _ip("netns", "del", namespace)
        _ip("link", "del", network.name)


def _free_subnet() -> str:
    taken = _ip("-o", "-4", "addr", "show")
    wanted = (f"10.213.{(os.getpid() + number) % 256}" for number in range(256))
    return next(subnet for subnet in wanted if f" {subnet}.1/" not in taken)


def _ip(*arguments: str) -> str:
    return subprocess.run(("ip", *arguments), check=True, capture_output=True, timeout=60).stdout.decode()
