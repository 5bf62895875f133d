"""A browser's and a Prometheus's part, in a process of its own: asks for the page's news and for /metrics at intervals.

    python -m benchmarks.page_client PORT SCRAPE_EVERY_S

It says `reading` when it has the page, and measures nothing; it ends when it is killed, or with the server.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.client import HTTPConnection

HOST = "127.0.0.1"
ASK_EVERY_S = 1.0


def fetched(port: int, path: str) -> bytes:
    connection = HTTPConnection(HOST, port, timeout=30)
    connection.request("GET", path)
    body = connection.getresponse().read()
    connection.close()
    return body


def read_page(port: int) -> None:
    """What a browser loads, then what is new, once a second."""
    fetched(port, "/")
    position = json.loads(fetched(port, "/page/history"))["position"]
    print("reading", flush=True)
    while True:
        position = json.loads(fetched(port, f"/page/news?after={position}"))["position"]
        time.sleep(ASK_EVERY_S)


def main() -> None:
    port, every_s = int(sys.argv[1]), float(sys.argv[2])
    reading = threading.Thread(target=read_page, args=(port,), daemon=True)
    reading.start()
    while reading.is_alive():
        fetched(port, "/metrics")
        time.sleep(every_s)


if __name__ == "__main__":
    main()
