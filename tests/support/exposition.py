"""One figure of what a service answers to /metrics."""

import re
from urllib.request import ProxyHandler, build_opener

_RUN = re.compile(r'\{run="[^"]*"\}|run="[^"]*",|,run="[^"]*"')


def metric(address: str, sample: str) -> float:
    with build_opener(ProxyHandler({})).open(f"http://{address}/metrics", timeout=60) as answer:
        text = _RUN.sub("", answer.read().decode())
    found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0
