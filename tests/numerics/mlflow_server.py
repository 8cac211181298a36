"""A stand-in for an MLflow server, which kills itself when the metrics of a step arrive: run by `test_trackers.py`.

    python tests/numerics/mlflow_server.py STEP

It prints its port, and each step whose metrics it has taken.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

INFO = {
    "run_id": "abc", "run_uuid": "abc", "experiment_id": "1", "status": "RUNNING", "artifact_uri": "mlflow-artifacts:/1", "lifecycle_stage": "active",
    "start_time": 1, "run_name": "one",
}  # fmt: skip
ANSWER = {
    "experiment": {"experiment_id": "1", "name": "one", "lifecycle_stage": "active"},
    "run": {"info": INFO, "data": {}},
    "run_info": INFO,
}


class Handler(BaseHTTPRequestHandler):
    """Answers everything alike."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        asked = json.loads(self.rfile.read(length) or b"{}")
        steps = {int(one.get("step", 0)) for one in [*asked.get("metrics", []), asked] if "value" in one}
        for step in sorted(steps):
            print(step, flush=True)
        if max(steps, default=0) >= int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        self._answer()

    def _answer(self) -> None:
        body = json.dumps(ANSWER).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
