"""A real Prometheus beside a local run: it scrapes the run's services, and its answers are read over its HTTP API.

For recording what dashboards show, and for tests. It computes nothing itself.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

START_S = 60.0
_LISTENS = re.compile(r'msg="?Listening on"? .*address=(\S+)')

Series = dict[str, Any]
"""`{"metric": {label: value}, "values": [[unix time, text], ...]}`"""


class QueryRefused(Exception):
    """Prometheus' own words."""


@dataclass(frozen=True)
class Prometheus:
    """One that answers at `address`, host:port."""

    address: str

    def query(self, expression: str, at_s: float | None = None) -> list[Series]:
        """An instant query; raises `QueryRefused`."""
        when = {} if at_s is None else {"time": at_s}
        return list(self._get("query", {"query": expression, **when})["result"])

    def query_range(self, expression: str, start_s: float, end_s: float, step_s: float) -> list[Series]:
        """Series without those values that are no number; raises `QueryRefused`."""
        span = {"query": expression, "start": start_s, "end": end_s, "step": step_s}
        found = self._get("query_range", span)["result"]
        numbers = [series | {"values": [pair for pair in series["values"] if pair[1] != "NaN"]} for series in found]
        return [series for series in numbers if series["values"]]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules", {})["groups"] for rule in group["rules"]]

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _get(self, path: str, parameters: Mapping[str, object]) -> dict[str, Any]:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return dict(json.loads(answer.read())["data"])
        except urllib.error.HTTPError as error:
            raise QueryRefused(f"{parameters.get('query')}: {error.read().decode(errors='replace')}") from error


def run_targets(run_dir: Path, process: subprocess.Popen[bytes]) -> dict[str, object]:
    """Where the run of `process` tells its services' addresses, for a scrape config; waits until it does.

    Raises `RuntimeError` when it ends before.
    """
    address = run_dir / "addresses" / "runner.json"
    while not address.exists():
        if process.poll() is not None:
            raise RuntimeError(f"the run in {run_dir} ended before it said where its targets are")
        time.sleep(0.05)
    url = f"http://{json.loads(address.read_text(encoding='utf-8'))['http']}/targets"
    return {"http_sd_configs": [{"url": url, "refresh_interval": "1s"}]}


@contextmanager
def prometheus_server(
    program: str, folder: Path, scrape_configs: Sequence[object], *, every: str = "1s", rules: Sequence[Path] = ()
) -> Iterator[Prometheus]:
    """Starts it on a port that the system chooses, with its files in `folder`, which must be there; ends it at the end."""
    config = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "scrape_configs": list(scrape_configs),
        "rule_files": [str(path) for path in rules],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    arguments = [f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}"]
    output = folder / "prometheus.log"
    with output.open("wb") as file:
        command = [program, *arguments, "--web.listen-address=127.0.0.1:0"]
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield _when_ready(process, output)
    finally:
        process.terminate()
        process.wait()


def _when_ready(process: subprocess.Popen[bytes], output: Path) -> Prometheus:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        listens = _LISTENS.search(output.read_text(encoding="utf-8", errors="replace"))
        if listens and (server := Prometheus(listens[1])).ready():
            return server
        time.sleep(0.05)
    raise RuntimeError(f"no Prometheus: {output.read_text(encoding='utf-8', errors='replace')}")
