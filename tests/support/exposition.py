"""What a service answers over HTTP, and one figure of its /metrics."""

import re
from urllib.request import ProxyHandler, build_opener

import httpx

_RUN = re.compile(r'\{run="[^"]*"\}|run="[^"]*",|,run="[^"]*"')


def get(port: int, path: str, **headers: str) -> tuple[int, str]:
    """Status and text; (0, "") when nobody answers."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers, timeout=60, trust_env=False)
    except httpx.TransportError:
        return 0, ""
    return answer.status_code, answer.text


def metric(address: str, sample: str) -> float:
    with build_opener(ProxyHandler({})).open(f"http://{address}/metrics", timeout=60) as answer:
        text = _RUN.sub("", answer.read().decode())
    found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0
