"""Forks a process for each episode: `python -m services.verifier.episode_worker`, started by the verifier. Linux.

This process has imported the user's code, so that a fork costs milliseconds and little memory, and runs none of it. It consumes
orders on a socket, and produces the end of each episode's process there. It waits for the next order, which the verifier sends,
and for the end of a process. An order to begin comes with a socket, which becomes the episode's: the verifier's request is the
first frame on it; back come one byte each time the episode begins and ends to wait for the policy, and then its result, or its
answer for the judge.

An episode's process is in a session of its own, within limits of address space and CPU time, and dies with this one. Whatever
it started or left behind is killed when it ends, or when the verifier wants it ended. All frames are those of
`multiprocessing.connection`.
"""

from __future__ import annotations

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
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from pipelinerl.errors import FieldError, UserError
from pipelinerl.recipe.fields import ProblemSet, Recipe
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_CRASHED, EpisodeRequest, VerifyItem
from services.verifier.confinement import (
    MIB,
    address_space,
    attach_to_parent,
    children,
    clear_leftover_children,
    kill_group,
    kill_tree,
    lower_limit,
    renew_cpu_limit,
    take_pipes,
)
from services.verifier.episode import Play, Policy, load_play, run_episode
from services.verifier.sandbox import NoSandbox, confine, confinement_missing
from services.verifier.worker import failed

ORDER = struct.Struct("!cQ")
"""What, and the number of an episode."""
BEGIN, KILL = b"B", b"K"
ENDED = struct.Struct("!Qi")
"""Number of an episode, and how its process ended, as `os.waitstatus_to_exitcode` says it; `NOT_FORKED`: it never began."""
NOT_FORKED = -(1 << 31)
WAITS, WORKS = b"W", b"E"
"""The episode waits for the policy; it is the environment's turn."""
JUDGE = b"J"
"""Before an answer that a judge scores. No result begins so: first comes the tag of its id."""


def main() -> int:
    attach_to_parent()
    pipes = take_pipes()
    requests, results = pipes
    orders = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(orders.fileno(), False)
    try:
        recipe = Recipe.model_validate_json(requests.recv_bytes())
        tasks = recipe.episodic_tasks
        plays = {name: _play_of(recipe, name, search_path=sys.argv[2]) for name in tasks}
        if missing := confinement_missing():
            for share in tasks.values():
                if share.reward.sandbox:
                    raise FieldError("reward.sandbox", True, missing)
                print(f"{share.task.source} {share.name} runs without a sandbox: {missing}", file=sys.stderr)
    except UserError as error:
        results.send_bytes(str(error).encode())
        return 1
    results.send_bytes(b"")
    gc.collect()
    gc.freeze()  # collecting in a child would copy all pages that it now shares
    Template(tasks, plays, orders, pipes).serve()
    return 0


def _play_of(recipe: Recipe, name: str, search_path: str) -> Play:
    share = recipe.episodic_tasks[name]
    if share.task.source != "verifiers":
        return load_play(share, search_path)
    from services.verifier.verifiers_play import play_verifiers

    return play_verifiers(share.task, recipe.seed, is_trained_on=name in recipe.mixture)


class Template:
    def __init__(
        self,
        tasks: Mapping[str, ProblemSet],
        plays: Mapping[str, Play],
        orders: socket.socket,
        pipes: tuple[Connection, Connection],
    ) -> None:
        self._tasks, self._plays, self._orders, self._pipes = tasks, plays, orders, pipes
        self._running: dict[int, int] = {}
        """Number of each episode under way, by its process."""
        self._pid, self._wake = os.getpid(), socket.socketpair()

    def serve(self) -> None:
        """Until the verifier closes its end."""
        woken, waking = self._wake
        for end in self._wake:
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as ready:
            ready.register(self._orders, selectors.EVENT_READ)
            ready.register(woken, selectors.EVENT_READ)
            while True:
                events = {key.fileobj for key, _ in ready.select()}
                if woken in events:
                    woken.recv(4096)
                self._reap()
                if self._orders in events and not self._take_order(ready):
                    return

    def _take_order(self, ready: selectors.BaseSelector) -> bool:
        """False when there will be no more."""
        order, descriptors, _, _ = socket.recv_fds(self._orders, ORDER.size, 1)
        if not order:
            return False
        what, number = ORDER.unpack(order)
        if what == KILL:
            for pid in [pid for pid, running in self._running.items() if running == number]:
                kill_tree(pid)
            return True
        try:
            pid = os.fork()
        except OSError as error:  # a limit of processes or memory: the others go on
            print(f"no process for an episode: {error}", file=sys.stderr)
            self._orders.sendall(ENDED.pack(number, NOT_FORKED))
        else:
            if pid == 0:
                ready.close()
                self._become_episode(descriptors[0])
            self._running[pid] = number
        os.close(descriptors[0])
        return True

    def _reap(self) -> None:
        """Tells of each episode's process that has ended, when what it left behind, adopted here, has been killed."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            is_episode = ended.si_pid in self._running
            if is_episode:
                kill_group(ended.si_pid)  # before the process is reaped: nobody else has its number until then
            _, status = os.waitpid(ended.si_pid, 0)
            for orphan in set(children(os.getpid())) - self._running.keys():
                kill_tree(orphan)
            if is_episode:
                number = self._running.pop(ended.si_pid)
                self._orders.sendall(ENDED.pack(number, os.waitstatus_to_exitcode(status)))

    def _become_episode(self, descriptor: int) -> NoReturn:
        """Runs in the new process."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._orders, *self._wake, *self._pipes):
                end.close()
            os.setsid()
            attach_to_parent()
            if os.getppid() == self._pid:
                os.set_inheritable(descriptor, False)
                _episode(self._tasks, self._plays, Connection(descriptor))
            code = 0
        except BaseException:  # noqa: BLE001 - the process boundary
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)  # nothing of the template's is tidied up, and no thread keeps the process


def is_confined(share: ProblemSet) -> bool:
    """Whether the task's episodes run in a sandbox on this machine."""
    if share.reward.sandbox is None:  # an agent may do what it likes unless told otherwise; verifiers has servers of its own
        return share.task.source not in ("agent", "verifiers") and not confinement_missing()
    return share.reward.sandbox


def _episode(tasks: Mapping[str, ProblemSet], plays: Mapping[str, Play], verifier: Connection) -> None:
    """Consumes one request and produces its result."""
    request = EpisodeRequest.FromString(verifier.recv_bytes())
    share, play = tasks[request.task], plays[request.task]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lower_limit(resource.RLIMIT_AS, address_space() + share.reward.memory_mib * MIB)
    renew_cpu_limit(share.task.episode_timeout_s)
    if is_confined(share):
        named = [Path(word).parent for word in shlex.split(share.task.command) if os.path.isfile(word)]
        try:
            confine([*filter(None, [share.task.path]), *named], urlsplit(request.base_url).port)
        except NoSandbox as error:
            result = failed(VERIFY_STATUS_CRASHED, f"the episode has no sandbox: {error}")
            result.sequence_id = request.sequence_id
            verifier.send_bytes(result.SerializeToString())
            return
    random.seed(request.seed)  # else all episodes would draw the same from the template's state
    pid = os.getpid()

    policy = Policy(request.base_url, lambda waits: verifier.send_bytes(WAITS if waits else WORKS))
    result = run_episode(play, request, policy, share.reward.max_abs)
    if os.getpid() != pid:
        return  # the environment forked, and its child came back as if it were the episode
    clear_leftover_children()
    verifier.send_bytes(JUDGE * isinstance(result, VerifyItem) + result.SerializeToString())


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)
