"""Base classes of the errors that reach users or other services. Modules add their own subclasses.

A user's mistake is a `UserError`, whose text names the fix. The other errors report failures, such as an unreachable service.
The command line prints the text of either kind without a traceback.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import traceback
from collections.abc import Sequence

EXIT_OK, EXIT_FAILURE, EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_UNREAD = 0, 1, 2, 130, 141
"""Exit codes of commands and services. `EXIT_UNREAD`: the reader of the output closed the pipe."""


class PipelineRLError(Exception):
    """Base of all errors below."""


class UserError(PipelineRLError, ValueError):
    """The user must correct something: a value, a file, the installation or a permission."""


class FieldError(UserError):
    """One value of a recipe, setting, request or command is wrong. `field`: its dotted path, variable or option. `fix`: allowed
    values, or what to do."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        self.field, self.value, self.fix = field, value, fix
        shown = repr(value)
        super().__init__(f"{field} = {shown if len(shown) <= 120 else shown[:117] + '...'}: {fix}")


class Lacking(FieldError):
    """This machine cannot do what a recipe asks for, although the recipe may be right."""


class MissingPackage(UserError):
    """A Python package that the user's input needs is not installed here."""


class MessageError(PipelineRLError):
    """A message from another process does not parse or contradicts itself. The receiver counts it and does not use it."""

    def __init__(self, kind: str, field: str, problem: str) -> None:
        self.kind, self.field, self.problem = kind, field, problem
        super().__init__(f"{kind}.{field}: {problem}" if field else f"{kind}: {problem}")


class BusError(PipelineRLError):
    """NATS is unreachable or refused a request, or a stream is full."""


class PayloadTooLarge(BusError):
    """A message exceeds the server's max_payload."""

    def __init__(self, subject: str, size_bytes: int, limit_bytes: int) -> None:
        self.subject, self.size_bytes, self.limit_bytes = subject, size_bytes, limit_bytes
        super().__init__(f"message of {size_bytes} bytes on {subject} exceeds max_payload of {limit_bytes} bytes")


class NotPermitted(UserError):
    """NATS does not let this user publish or subscribe to a subject. Waiting does not help, so the service ends."""

    def __init__(self, user: str, subject: str, action: str = "publish") -> None:
        self.user, self.subject, self.action = user, subject, action
        super().__init__(
            f"NATS user {user!r} may not {action} to {subject}; this command prints the permissions that a run needs: "
            "python -m pipelinerl.bus.permissions RUN"
        )


class TransferError(PipelineRLError):
    """A weight transfer failed: a deadline passed, a checksum or manifest did not match, or a member was lost."""


class ManifestMismatch(TransferError):
    """The trainer's and an actor's weights have different manifests."""


class ServiceError(PipelineRLError):
    """A service of the run cannot be started or reached, or has died."""


def as_unicode(text: str) -> str:
    """Replace each surrogate, which JSON may contain, by U+FFFD. Protobuf and tokenizers refuse surrogates."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of the error's message, or else the name of its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def how_ended(code: int) -> str:
    """Describe a process's exit code: `exit code 1`, `SIGKILL` for -9, or `signal 35` for -35, a signal without a name."""
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


def counted(count: int, what: str) -> str:
    """Return a count with its unit, such as `1 actor` or `2,048 actors`."""
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def one_of(names: Sequence[str]) -> str:
    """Join one or more names to a text such as `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


_STANDARD_LIBRARY = os.path.dirname(os.__file__)
_OURS = tuple(os.path.join(os.path.dirname(os.path.dirname(__file__)), name, "") for name in ("pipelinerl", "services"))


def located(error: BaseException) -> str:
    """Return type, first line and place of an error in a user's code, such as `KeyError: 'unit' at rewards.py:7`. The place is
    the innermost frame outside this project and all libraries, else the innermost in an installed package, if any."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno or 0))
    frames = [one for one in frames if not one[0].startswith(("<", *_OURS))]
    installed = [one for one in frames if "site-packages" in one[0] or "dist-packages" in one[0]]
    own = [one for one in frames if one not in installed and not one[0].startswith(_STANDARD_LIBRARY)]
    said = first_line(error)
    text = said if said == type(error).__name__ else f"{type(error).__name__}: {said}"
    if not (own or installed):
        return text
    file, line = (own or installed)[-1]
    with contextlib.suppress(OSError):  # the current folder is gone
        file = file.removeprefix(os.path.join(os.getcwd(), ""))
    return f"{text} at {file}:{line}"
