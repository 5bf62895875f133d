"""`python -m services.verifier.episode_worker`: fork a process for each episode. The verifier starts this process. Linux only.

This process, the template, imports the user's code once, so a fork takes only milliseconds and little memory. Over one socket
it takes the verifier's orders and reports the ends of episodes.

An order to begin carries a socket for the new episode. Over this socket, the verifier sends the request, and the episode sends
its result or, for a judge, its answer. An episode with an environment or tools also sends a byte whenever it starts or stops
waiting for the policy. Frames are those of `multiprocessing.connection`. An episode's process has its own session and limits of
address space and CPU time, and dies with the template. When it ends, all processes that it started are killed.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import resource
import selectors
import shlex
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import numpy.random

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import ProblemSet, Recipe
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_CRASHED, EpisodeRequest, VerifyItem
from services.verifier import confinement
from services.verifier.episode import Play, Policy, load_play, play_verifiers, run_episode
from services.verifier.rewards.compose import failed
from services.verifier.sandbox import NoSandbox, confine, confinement_missing
from services.verifier.worker import run_process

ORDER = struct.Struct("!cQ")
"""Format of an order: its kind, and the number of the episode."""
BEGIN, KILL = b"B", b"K"
ENDED = struct.Struct("!Qi")
"""Format of a report: the episode's number, and its exit code as in `os.waitstatus_to_exitcode`, or `NOT_FORKED`."""
NOT_FORKED = -(1 << 31)
WAITS, WORKS = b"W", b"E"
"""Frames that an episode sends when it begins to wait for the policy, and when its environment works again."""
JUDGE = b"J"
"""First byte of a frame with an answer for a judge. No serialized result begins with this byte."""


def _prepared(recipe: Recipe) -> Callable[[Connection, Connection], int]:
    orders = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(orders.fileno(), False)
    tasks = recipe.episodic_tasks
    plays = {
        name: play_verifiers(share.task, recipe.seed, is_trained_on=name in recipe.mixture)
        if share.task.source == "verifiers"
        else load_play(share, search_path=sys.argv[2])
        for name, share in tasks.items()
    }
    if missing := confinement_missing():
        for share in tasks.values():
            if share.reward.sandbox:
                raise FieldError("reward.sandbox", True, missing)
            print(f"{share.task.source} {share.name} runs without a sandbox: {missing}", file=sys.stderr)
    gc.collect()
    gc.freeze()  # a collection in a child would copy all shared pages
    return lambda *pipes: Template(tasks, plays, orders, pipes).serve()


@dataclass
class Template:
    tasks: Mapping[str, ProblemSet]
    plays: Mapping[str, Play]
    orders: socket.socket
    pipes: tuple[Connection, Connection]
    _running: dict[int, int | None] = field(default_factory=dict)
    """Numbers of episodes by pid; None for a process that was killed because its episode left it behind."""
    _pid: int = field(default_factory=os.getpid)
    _ready: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def serve(self) -> int:
        """Perform orders until the verifier closes its end of the socket. Return the process's exit code, 0."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if users' code ignored it, ended processes would have no status
        self._ready.register(self.orders, selectors.EVENT_READ)
        while True:
            for key, _ in self._ready.select():
                if key.fileobj is not self.orders:
                    self._reap(key.fd, key.data)
                elif not self._take_order():
                    return 0

    def _take_order(self) -> bool:
        """Perform one order. Return False if the verifier has closed the socket."""
        order, descriptors, _, _ = socket.recv_fds(self.orders, ORDER.size, 1)
        if not order:
            return False
        what, number = ORDER.unpack(order)
        if what == KILL:
            for pid in [pid for pid, running in self._running.items() if running == number]:
                confinement.kill_tree(pid)
            return True
        try:
            if not descriptors:
                raise OSError(errno.EMFILE, "this process has no free file descriptor for the episode's socket")
            if (pid := os.fork()) == 0:
                self._become_episode(descriptors[0])
            self._await_end(pid, number)
        except OSError as error:  # processes, files or memory are at their limit; other episodes go on
            print(f"cannot fork an episode: {error}", file=sys.stderr)
            self.orders.sendall(ENDED.pack(number, NOT_FORKED))
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _await_end(self, pid: int, number: int | None) -> None:
        """Let `serve` notice the end of a child. If no descriptor is left, kill the child and raise `OSError`."""
        try:
            self._ready.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        except OSError:
            confinement.kill_tree(pid)
            os.waitpid(pid, 0)
            raise
        self._running[pid] = number

    def _reap(self, descriptor: int, pid: int) -> None:
        """Reap an ended process, kill the processes that it left behind, and report the end of an episode."""
        self._ready.unregister(descriptor)
        os.close(descriptor)
        confinement.kill_group(pid)  # before the process is reaped, since its pid may be reused afterwards
        _, status = os.waitpid(pid, 0)
        number = self._running.pop(pid)
        for orphan in set(confinement.children(os.getpid())) - self._running.keys():
            confinement.kill_tree(orphan)
            with suppress(OSError):
                self._await_end(orphan, None)
        if number is not None:
            self.orders.sendall(ENDED.pack(number, os.waitstatus_to_exitcode(status)))

    def _become_episode(self, descriptor: int) -> NoReturn:
        code = 1
        try:
            for key in self._ready.get_map().values():
                os.close(key.fd)
            for end in (self._ready, *self.pipes):
                end.close()
            os.setsid()
            confinement.attach_to_parent()
            if os.getppid() == self._pid:
                os.set_inheritable(descriptor, False)
                _episode(self.tasks, self.plays, Connection(descriptor))
            code = 0
        except BaseException:  # noqa: BLE001 - the process boundary
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)  # without the template's clean-up, and without waiting for threads


def is_confined(share: ProblemSet) -> bool:
    """Return whether the task's episodes run in a sandbox on this machine."""
    if share.reward.sandbox is None:  # agents are trusted by default; the package `verifiers` runs its own servers
        return share.task.source not in ("agent", "verifiers") and not confinement_missing()
    return share.reward.sandbox


def _episode(tasks: Mapping[str, ProblemSet], plays: Mapping[str, Play], verifier: Connection) -> None:
    request = EpisodeRequest.FromString(verifier.recv_bytes())
    share, play = tasks[request.task], plays[request.task]
    confinement.lower_limit(resource.RLIMIT_AS, confinement.address_space() + share.reward.memory_mib * confinement.MIB)
    confinement.renew_cpu_limit(share.task.episode_timeout_s)
    if is_confined(share):
        named = [Path(word).parent for word in shlex.split(share.task.command) if os.path.isfile(word)]
        try:
            confine([*filter(None, [share.task.path]), *named], urlsplit(request.base_url).port)
        except NoSandbox as error:
            refusal = failed(VERIFY_STATUS_CRASHED, f"the episode has no sandbox: {error}", request.sequence_id)
            verifier.send_bytes(refusal.SerializeToString())
            return
    random.seed(request.seed)  # otherwise all episodes would draw the same numbers from the template's state
    numpy.random.seed(request.seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(request.seed)
    pid = os.getpid()

    policy = Policy(request.base_url, lambda waits: verifier.send_bytes(WAITS if waits else WORKS))
    result = run_episode(play, request, policy, share.reward.max_abs)
    if os.getpid() != pid:
        return  # in a child that the environment forked
    confinement.clear_leftover_children()
    verifier.send_bytes(JUDGE * isinstance(result, VerifyItem) + result.SerializeToString())


if __name__ == "__main__":
    run_process(_prepared)
