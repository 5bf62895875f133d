"""A connection to NATS that reconnects; `bus_errors`, which turns nats-py's errors into `BusError`; a base class of readers.

`Connection` extends nats-py's client. Its requests raise `NotPermitted` if the server refuses them, else nats-py's errors.
The files with login and certificates are read again for each connection. If one of them is unreadable, the first connection
fails, but a later one uses the previous content and logs a warning. If TLS is configured, no login is sent without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import logging
import re
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pipelinerl.bus.permissions import inbox_prefix
from pipelinerl.errors import BusError, FieldError, NotPermitted
from pipelinerl.service.tls import CA, CERTIFICATE, present, read_file, trust

_log = logging.getLogger(__name__)

_CREDENTIALS, _TLS_DIR = "nats_credentials", "nats_tls_dir"


def read_login(credentials: Path | None) -> dict[str, str]:
    """Return nats-py's login options for a .creds file or a file with `user:password`. Raises `FieldError` if unusable."""
    if credentials is None:
        return {}
    text = read_file(credentials, _CREDENTIALS).decode(errors="replace").strip()
    if "BEGIN NATS USER JWT" in text:
        if importlib.util.find_spec("nkeys") is None:
            raise FieldError(_CREDENTIALS, str(credentials), "a .creds file needs nkeys: pip install nkeys")
        return {"user_credentials": str(credentials)}
    user, colon, password = text.partition(":")
    if not colon or not user:
        raise FieldError(_CREDENTIALS, str(credentials), "the file must hold user:password or be a .creds file")
    return {"user": user, "password": password}


def tls_context(tls_dir: Path | None) -> ssl.SSLContext:
    """Return a context that trusts the folder's ca.crt and presents its tls.crt if there is one. Without a folder, the context
    trusts the machine's CAs. Raises `FieldError`, naming the file."""
    if tls_dir is None:
        return ssl.create_default_context()
    read_file(tls_dir / CA, _TLS_DIR)
    trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), tls_dir, _TLS_DIR)  # only to name a faulty file in the error
    context = ssl.create_default_context(cafile=tls_dir / CA)  # with Python's default TLS flags
    if (tls_dir / CERTIFICATE).exists():
        present(context, tls_dir, _TLS_DIR)
    return context


_RECONNECT_WAIT_S = 0.5
_PING_INTERVAL_S = 5
_MAX_OUTSTANDING_PINGS = 2
_STREAM_NOT_FOUND, _STORE_FAILED = 10059, 10077
_NO_PEERS, _NO_LEADER, _NOT_THE_LEADER = 10005, 10008, 10009
_BEFORE_SCHEME = re.compile(r",(?=\s*[a-z]+://)", re.IGNORECASE)
_LOGIN = re.compile(r"^(\s*[a-z][a-z0-9+.-]*://)?.*@", re.IGNORECASE | re.DOTALL)


def redacted(urls: str) -> str:
    """Return the comma-separated `urls` with `***` for each user and password. A password may hold any character, so everything
    from a server's scheme to its last `@` is hidden, even a whole server if the next one has a login but no scheme."""
    return ",".join(_LOGIN.sub(r"\1***@", url) for url in _BEFORE_SCHEME.split(urls))


@contextlib.contextmanager
def bus_errors(action: str) -> Iterator[None]:
    """Turn nats-py's errors into a `BusError` whose text starts with `action`. If nats-py swallowed a cancellation while it
    flushed a large message, raise the cancellation again."""
    task, error = asyncio.current_task(), None
    cancellations = task.cancelling() if task else 0
    try:
        yield
    except (nats.errors.Error, OSError, TimeoutError) as raised:
        error = raised
    if task is not None and task.cancelling() > cancellations:
        raise asyncio.CancelledError from error
    if error is not None:
        raise BusError(f"{action}: {_reason(error)}") from error


def _api_code(error: Exception) -> int | None:
    return error.__cause__.err_code if isinstance(error.__cause__, nats.js.errors.APIError) else None


def is_stream_missing(error: Exception) -> bool:
    return _api_code(error) == _STREAM_NOT_FOUND


def is_cluster_forming(error: Exception) -> bool:
    """Return whether the error may mean that the servers of a cluster have not elected a leader yet."""
    return _api_code(error) in (_NO_PEERS, _NO_LEADER, _NOT_THE_LEADER) or isinstance(error.__cause__, TimeoutError)


def is_stream_full(error: BusError) -> bool:
    return _api_code(error) == _STORE_FAILED and "maximum" in str(error)


def _reason(error: Exception) -> str:
    if isinstance(error, nats.errors.NoRespondersError):
        return "no stream takes this subject: the run's streams do not exist (yet), or JetStream is off"
    if isinstance(error, nats.js.errors.ServiceUnavailableError) and not error.description:
        return "JetStream is off: start nats-server with -js"
    if isinstance(error, nats.js.errors.APIError):
        return f"{error.description or type(error).__name__} (JetStream error {error.err_code or error.code})"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error).removeprefix("nats: ") or type(error).__name__


NS = 1_000_000_000
_ENDS_NOTHING = ("permissions violation", "stale connection")
_REFUSAL = re.compile(r'permissions violation for (publish|subscription)\b[^"]*"([^"]*)"', re.IGNORECASE)


class Connection(Client):
    """nats-py's client, connected inside an `opened` block. It notifies `pullers` of reconnections and refusals. It also
    reconnects if the server ends the connection with an error, for example because the server's users have changed."""

    def __init__(
        self, url: str, credentials: Path | None = None, tls_dir: Path | None = None, request_timeout_s: float = 10.0
    ) -> None:
        """`url` may list several servers, separated by commas. Raises `FieldError` for unusable `credentials` or `tls_dir`."""
        super().__init__()
        self.url, self.request_timeout_s = redacted(url), request_timeout_s
        self._urls, self._credentials, self._tls_dir = url.split(","), credentials, tls_dir
        self._login, self._context = read_login(credentials), tls_context(tls_dir)
        self.user = self._login.get("user", "")
        """Name of the user, from the login or the first URL; empty if neither has one."""
        with contextlib.suppress(ValueError):  # a malformed URL is reported when it is used
            self.user = self.user or urlsplit(self._urls[0]).username or ""
        self._requires_tls = tls_dir is not None or any(server.strip().lower().startswith("tls://") for server in self._urls)
        self.js = self.jetstream(timeout=request_timeout_s)
        self.pullers: set[Puller] = set()
        self._connected, self._was_connected, self._last_error = asyncio.Event(), False, ""
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}  # open requests by token: (subject, answer)
        self._tokens = map(str, itertools.count())
        self._answers = ""  # beginning of the subjects of answers
        self._answers_refused = False  # True if this user may not subscribe to answers

    @contextlib.asynccontextmanager
    async def opened(self, name: str, timeout_s: float) -> AsyncIterator[None]:
        """Connect, and reconnect until the block ends. Raises `BusError` with the url if no server answers within
        `timeout_s`, or if a login or certificate is refused. Raises `NotPermitted` if this user may not read its own inbox."""
        logging.getLogger("asyncio").addFilter(_is_worth_telling)
        try:
            await self._open(name, timeout_s)
            await self._subscribe_answers()
            yield
        finally:
            if self.options:  # empty if nats-py refused the URL: then nothing is open
                with contextlib.suppress(OSError):  # the server is gone already
                    await self.close()

    async def wait_connected(self, timeout_s: float | None = None) -> None:
        """Wait for a connection. Raises `BusError` if there is none within `timeout_s`, by default `request_timeout_s`."""
        if self._connected.is_set():
            return
        try:
            async with asyncio.timeout(self.request_timeout_s if timeout_s is None else timeout_s):
                await self._connected.wait()
        except TimeoutError:
            raise BusError(f"not connected to {self.url}: {self._last_error or 'connection lost'}") from None

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float | None = None,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Send a request and return the answer, at half the cost of nats-py's method. Any number of tasks may wait at once.

        Raises `NotPermitted` as soon as the server refuses the subject or the subscription to answers. Raises nats-py's errors
        if nobody listens, if no answer comes in `timeout` (seconds; default: `request_timeout_s`), or if the connection is
        lost. In the last two cases, the message may have been received.
        """
        if self._answers_refused:
            raise self._no_answers()
        answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        token = next(self._tokens)
        self._waiting[token] = (subject, answer)
        timer = asyncio.get_running_loop().call_later(
            self.request_timeout_s if timeout is None else timeout, _fail, answer, nats.errors.TimeoutError()
        )
        try:
            await self.publish(subject, payload, reply=self._answers + token, headers=headers)
            message = await answer
        finally:
            timer.cancel()
            del self._waiting[token]
        if message.headers and message.headers.get("Status") == "503":
            raise nats.errors.NoRespondersError
        return message

    async def ask(self, subject: str, payload: bytes = b"", headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Ask JetStream and return its answer. Raises the errors of `request`, and `APIError` if the answer is an error."""
        answer: dict[str, Any] = json.loads((await self.request(subject, payload, headers=headers)).data)
        if "error" in answer:
            raise nats.js.errors.APIError.from_error(answer["error"])
        return answer

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """TLS context from the current files. nats-py reads this property for each connection."""
        try:
            self._context = tls_context(self._tls_dir)
        except FieldError as error:
            _log.warning("cannot read the certificates for NATS; connecting with the previous ones: %s", error)
        return self._context

    async def _open(self, name: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.connect(
                    self._urls,
                    name=name,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnect,
                    reconnected_cb=self._on_reconnect,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]
                    ping_interval=_PING_INTERVAL_S,
                    max_outstanding_pings=_MAX_OUTSTANDING_PINGS,
                    inbox_prefix=inbox_prefix(self.user),
                    **self._login,  # type: ignore[arg-type]
                )
        except (nats.errors.Error, OSError, TimeoutError) as error:
            reason = self._last_error or _reason(error)
            raise BusError(f"cannot connect to NATS at {self.url} within {timeout_s:g} s: {reason}") from error
        self._last_error, self._was_connected = "", True
        self._connected.set()

    async def _subscribe_answers(self) -> None:
        """Subscribe to the answers to all requests. nats-py renews the subscription after a reconnection."""
        self._answers = self.new_inbox() + "."
        with bus_errors(f"subscribing at {self.url}"):
            await self.subscribe(f"{self._answers}*", cb=self._on_answer, pending_msgs_limit=0, pending_bytes_limit=0)
            # nats-py's first ping may overtake the subscription. The answer to the second ping comes after any refusal.
            for _ in range(2):
                await self.flush()
        if self._answers_refused:
            raise self._no_answers()

    def _no_answers(self) -> NotPermitted:
        return NotPermitted(self.user, f"{self._answers}*", "subscribe")

    async def _on_answer(self, message: Msg) -> None:
        _subject, answer = self._waiting.get(message.subject[len(self._answers) :], ("", None))
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def _on_error(self, error: Exception) -> None:
        previous, self._last_error = self._last_error, self._named(error)
        if self._last_error != previous:  # the same error is not logged again for each attempt to connect
            _log.warning("NATS at %s: %s", self.url, self._last_error)
        if refusal := _REFUSAL.search(str(error)):
            lowered = refusal[2].lower()
            self._answers_refused = self._answers_refused or lowered == f"{self._answers}*".lower()
            for subject, answer in self._waiting.values():
                if self._answers_refused:
                    _fail(answer, self._no_answers())
                elif subject.lower() == lowered:
                    _fail(answer, NotPermitted(self.user, subject))
            for puller in list(self.pullers):
                puller.on_refusal(lowered)
        if self._was_connected:
            return
        # Raising an error ends nats-py's connect loop, which would otherwise repeat a refused attempt until the timeout.
        if "authorization" in self._last_error.lower():
            login = f"the login of user {self.user!r}" if self.user else "the login"
            raise BusError(f"NATS at {self.url} refuses {login}: {self._last_error}; check nats_credentials")
        if isinstance(error, ssl.SSLError) and len(self._urls) == 1:
            raise BusError(f"cannot connect to NATS at {self.url}: {self._last_error}")

    def _named(self, error: Exception) -> str:
        if not isinstance(error, ssl.SSLCertVerificationError):
            return _reason(error)
        trusted = self._tls_dir / CA if self._tls_dir else "the machine's CAs; is nats_tls_dir missing?"
        return f"{_reason(error)} (trusted: {trusted})"

    async def _on_disconnect(self) -> None:
        self._connected.clear()
        for _subject, answer in self._waiting.values():
            _fail(answer, nats.errors.Error("connection lost before the answer"))

    async def _on_reconnect(self) -> None:
        _log.info("reconnected to NATS at %s", self.url)
        self._last_error = ""
        self._connected.set()
        for puller in list(self.pullers):
            puller.on_reconnect()

    def _connect_command(self) -> bytes:
        if self._requires_tls and not self._server_info.get("tls_required"):
            raise nats.errors.Error("the server offers no TLS, which this connection requires; no password was sent")
        try:
            self._login = read_login(self._credentials)
        except FieldError as error:
            _log.warning("cannot read the NATS credentials; logging in with the previous ones: %s", error)
        self.options.update(self._login)
        return super()._connect_command()

    async def _process_connect_init(self) -> None:
        known, longest = len(self._server_pool), self._max_payload
        try:
            await super()._process_connect_init()
        except (OSError, ValueError, TypeError, AttributeError, nats.errors.Error) as error:
            # Any program may listen at this address. Its list of servers and its limits count only after a successful login.
            del self._server_pool[known:]
            self._max_payload = longest
            if isinstance(error, nats.errors.Error):
                raise
            # asyncio does not report the end of a connection whose TLS handshake failed, and nats-py would wait for ever.
            if self._transport is not None:
                self._transport.close()
                self._transport = None
            if isinstance(error, OSError):
                raise
            # nats-py tries again only after an OSError or an error of its own.
            raise nats.errors.Error(f"the server at this address does not speak NATS: {error}") from error

    async def _process_err(self, err_msg: str) -> None:
        if self.is_connected and not any(harmless in err_msg.lower() for harmless in _ENDS_NOTHING):
            await self._process_op_err(nats.errors.Error(f"the server ended the connection: {err_msg.strip(chr(39))}"))
        else:
            await super()._process_err(err_msg)


class Puller(ABC):
    """Base class of readers that request messages from a stream's consumer and wait for them at an inbox. A wait ends early
    after a reconnection, or if the server refuses the request."""

    def __init__(self, connection: Connection, stream: str, consumer: str = "") -> None:
        self._connection, self._stream, self._consumer = connection, stream, consumer
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._woken = asyncio.Event()
        self._error: BusError | NotPermitted | None = None

    @abstractmethod
    def on_reconnect(self) -> None: ...

    @abstractmethod
    async def _on_message(self, message: Msg) -> None: ...

    def on_refusal(self, refused: str) -> None:
        """Raise `NotPermitted` in the waiting task if this reader's requests use the subject `refused` (in lower case)."""
        if refused == self._asked.lower():
            self._error = NotPermitted(self._connection.user, self._asked)
            self._woken.set()

    @property
    def _asked(self) -> str:
        return f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"

    async def _subscribe(self, tokens: str = "") -> None:
        self._inbox = self._connection.new_inbox()
        self._subscription = await self._connection.subscribe(self._inbox + tokens, cb=self._on_message, pending_bytes_limit=0)
        self._connection.pullers.add(self)

    async def _ask(self, expires_s: float, token: str = "", **more: int) -> None:
        question = {"expires": int(expires_s * NS), **more}
        await self._connection.publish(self._asked, json.dumps(question).encode(), reply=self._inbox + token)

    async def _wait(self, timeout_s: float) -> bool:
        """Return whether a message or another event came in time. Raises the error that the event reports."""
        self._woken.clear()
        if self._error is None:
            with contextlib.suppress(TimeoutError):
                # `wait_for` may swallow a cancellation that comes with a message
                async with asyncio.timeout(timeout_s):
                    await self._woken.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._woken.is_set()

    async def _unsubscribe(self) -> None:
        self._connection.pullers.discard(self)
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            await subscription.unsubscribe()


def _fail(answer: asyncio.Future[Msg], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    """Return False for the harmless warning that asyncio logs whenever a TLS connection of nats-py ends."""
    return "eof_received() has no effect" not in record.getMessage()
