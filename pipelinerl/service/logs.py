"""Structured logs on the standard library: one line per event, as text for people or as JSON for a cluster.

Every line has run, service, instance and, once known, the policy version. The items of a call's `extra={...}` become fields of
the line.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    *("message", "asctime", "color_message", "taskName", "aggregated"),
    "vllm_process_name",  # vLLM puts it into every record of the process
}
_LEAST_LEVEL = {
    "uvicorn.error": logging.WARNING,
    "asyncio": logging.WARNING,
    "httpx": logging.WARNING,
    # transformers imports torchao if it is installed, and torchao warns of each GPU library that does not load.
    "torchao": logging.ERROR,
    "torch.utils._pytree": logging.ERROR,
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Escape control characters, which could steer a terminal; ESC becomes `\\x1b`. Tabs and newlines stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


@dataclass
class LogContext:
    """The process that writes the log. The process sets `policy_version` when its policy changes."""

    run: str
    service: str
    instance: str
    policy_version: int | None = None


def configure_logging(context: LogContext, *, log_format: Literal["text", "json"] = "text", level: str = "info") -> None:
    """Send all logs to standard error, and remove earlier handlers of the root logger."""
    handler = logging.StreamHandler()
    handler.addFilter(RepetitionFilter())
    handler.setFormatter(ContextFormatter(context, log_format))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    for name, least in _LEAST_LEVEL.items():
        logging.getLogger(name).setLevel(least)


_REPETITIVE = ("uvicorn.error", "opentelemetry.")
AGGREGATED = {"aggregated": True}
"""Argument `extra` for log lines that outsiders can cause at will. `RepetitionFilter` limits such lines."""
AGGREGATE_S = 60.0


class RepetitionFilter(logging.Filter):
    """Limits the log lines that outsiders can cause at will: one line of each kind passes per `AGGREGATE_S`, and says how many
    were left out before it. Lines of one kind have the same logger and format string. Lines with a traceback always pass."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info or not (record.name.startswith(_REPETITIVE) or getattr(record, "aggregated", False)):
            return True
        kind, now_s = (record.name, str(record.msg)), time.monotonic()
        passed_at_s, left_out = self._passed.get(kind, (-math.inf, 0))
        passes = now_s - passed_at_s >= AGGREGATE_S
        self._passed[kind] = (now_s, 0) if passes else (passed_at_s, left_out + 1)
        if passes and left_out:
            record.msg = f"{record.msg} ({left_out} lines of this kind were left out before)"
        return passes


def take_over(*libraries: str) -> None:
    """Make imported libraries log only through the root logger."""
    for name in (*libraries, *logging.root.manager.loggerDict):
        if name.partition(".")[0] in libraries:
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True


class ContextFormatter(logging.Formatter):
    """Format a record as one line of JSON, or as text such as `10:45:01.123 INFO run verifier/verifier-0 v8 logger: message
    key=value`, which a traceback may follow. Text may quote model output, so its control characters are escaped."""

    def __init__(self, context: LogContext, log_format: Literal["text", "json"]) -> None:
        super().__init__()
        self._context, self._format = context, self._json if log_format == "json" else self._text

    def format(self, record: logging.LogRecord) -> str:
        extras = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        return self._format(record, datetime.fromtimestamp(record.created, UTC), extras)

    def _json(self, record: logging.LogRecord, time: datetime, extras: dict[str, Any]) -> str:
        numbers = {key: str(value) for key, value in extras.items() if isinstance(value, float) and not math.isfinite(value)}
        line = extras | numbers  # JSON has neither NaN nor infinities
        line |= {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{key: value for key, value in vars(self._context).items() if value is not None},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)

    def _text(self, record: logging.LogRecord, time: datetime, extras: dict[str, Any]) -> str:
        context = self._context
        version = "" if context.policy_version is None else f" v{context.policy_version}"
        clock = time.astimezone().isoformat(sep=" ", timespec="milliseconds")[11:23]
        shown = "".join(f" {key}={value}" for key, value in extras.items())
        who = f"{context.run} {context.service}/{context.instance}{version}"
        line = f"{clock} {record.levelname} {who} {record.name}: {record.getMessage()}{shown}"
        return printable(f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line)


_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_ADDRESS = re.compile(r"UR[IL]S?$", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)\S+@")
"""A login in an address. It ends at the last @ of the word, because a password may contain / and @."""
_LONGEST = 400


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """Return `text` on one line of at most 400 characters. `***` replaces logins in addresses, and the values of secret
    variables, except values of up to 3 characters. Secret variables have names like `API_KEY`, or are URLs with a login."""
    secrets = [
        value
        for name, value in environment.items()
        if len(value) > 3 and (_SECRET.search(name) or (_ADDRESS.search(name) and "://" in value and "@" in value))
    ]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return " ".join(_LOGIN.sub("***@", text).split())[:_LONGEST]
