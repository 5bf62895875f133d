"""A browser's and a Prometheus's part, in a process of its own: reads the page's events, and asks for /metrics at intervals.

    python -m benchmarks.page_client PORT SCRAPE_EVERY_S

It shows nothing and measures nothing; it ends when it is killed, or with the server.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.client import HTTPConnection

HOST = "127.0.0.1"


def fetched(port: int, path: str) -> bytes:
    connection = HTTPConnection(HOST, port, timeout=30)
    connection.request("GET", path)
    body = connection.getresponse().read()
    connection.close()
    return body


def read_page(port: int) -> None:
    """What a browser loads, then events until the server ends them."""
    fetched(port, "/")
    position = json.loads(fetched(port, "/page/history"))["position"]
    connection = HTTPConnection(HOST, port)
    connection.request("GET", f"/page/events?after={position}")
    response = connection.getresponse()
    while response.readline():
        pass


def main() -> None:
    port, every_s = int(sys.argv[1]), float(sys.argv[2])
    reading = threading.Thread(target=read_page, args=(port,), daemon=True)
    reading.start()
    while reading.is_alive():
        fetched(port, "/metrics")
        time.sleep(every_s)


if __name__ == "__main__":
    main()
