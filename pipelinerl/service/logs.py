"""Structured logs on the standard library: one line per event, text for a person, JSON for a cluster.

Every line carries run, service, instance and, once bound, the policy version; what a call passes as `extra={...}`
becomes fields of the line. It rotates no files and ships nothing: the runner or the cluster takes what is written.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    *("message", "asctime", "color_message", "taskName"),
    "vllm_process_name",  # vLLM puts it into every record of the process
}
_LEAST_LEVEL = {
    "uvicorn.error": logging.WARNING,
    "asyncio": logging.WARNING,
    "httpx": logging.WARNING,
    # Where torchao is installed, transformers imports it, and it warns of each GPU library that does not load on this machine.
    "torchao": logging.ERROR,
    "torch.utils._pytree": logging.ERROR,
}


@dataclass
class LogContext:
    """Who writes. A process whose policy version changes assigns `policy_version`; the next line carries it."""

    run: str
    service: str
    instance: str
    policy_version: int | None = None


def configure_logging(
    context: LogContext,
    *,
    log_format: Literal["text", "json"] = "text",
    level: str = "info",
    stream: TextIO | None = None,
) -> None:
    """Sends the root logger to `stream` (standard error by default) in one format, replacing its handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(context) if log_format == "json" else TextFormatter(context))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    for name, least in _LEAST_LEVEL.items():
        logging.getLogger(name).setLevel(least)


def take_over(*libraries: str) -> None:
    """Sends the lines of imported libraries that made handlers of their own to the root logger's alone.

    Their levels stay. Loggers that a library makes later are not touched.
    """
    for name in (*libraries, *logging.root.manager.loggerDict):
        if name.partition(".")[0] in libraries:
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True


class _ContextFormatter(logging.Formatter):
    def __init__(self, context: LogContext) -> None:
        super().__init__()
        self._context = context


class JsonFormatter(_ContextFormatter):
    """One JSON object a line. A context field wins over an extra of the same name."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {key: _json_value(value) for key, value in _extras(record).items()}
        line |= {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "run": self._context.run,
            "service": self._context.service,
            "instance": self._context.instance,
        }
        if self._context.policy_version is not None:
            line["policy_version"] = self._context.policy_version
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(_ContextFormatter):
    """`10:45:01.123 INFO run verifier/verifier-0 v8 logger: message key=value`, a traceback on the lines below."""

    def format(self, record: logging.LogRecord) -> str:
        context = self._context
        version = "" if context.policy_version is None else f" v{context.policy_version}"
        time = _time(record).astimezone().isoformat(sep=" ", timespec="milliseconds")[11:23]
        extras = "".join(f" {key}={value}" for key, value in _extras(record).items())
        who = f"{context.run} {context.service}/{context.instance}{version}"
        line = f"{time} {record.levelname} {who} {record.name}: {record.getMessage()}{extras}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _json_value(value: Any) -> Any:
    """JSON has no NaN and no infinity; a line that holds one must still parse."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
