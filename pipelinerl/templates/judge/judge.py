"""A stand-in for a judge: an OpenAI-compatible server that marks short answers higher. Replace it by `vllm serve MODEL`."""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def mark(message):
    """Return a mark from 0 to 10 for the answer in a message to the judge."""
    answer = re.search(r"Answer to mark: (.*)\nMark it", message, re.DOTALL)[1].strip()
    return max(0, 11 - len(answer.split())) if answer else 0


class Judge(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = {"role": "assistant", "content": f"SCORE: {mark(asked['messages'][-1]['content'])}"}
        body = json.dumps({"choices": [{"index": 0, "message": said, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Print nothing for each request."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", 8399), Judge).serve_forever()
