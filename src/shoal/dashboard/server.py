"""HTTP on 127.0.0.1 for holders of a token: it reads runs' folders, and there is nothing that it writes.

The token is the first part of every path. Whatever else is asked for, with another token or none, under another host's
name, by another method, gets 404 and nothing more. No path of a request ever becomes the path of a file.
"""

from __future__ import annotations

import gzip
import json
import secrets
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import ClassVar
from urllib.parse import parse_qsl, urlsplit

from shoal.dashboard.answers import answer
from shoal.dashboard.metrics import metrics
from shoal.dashboard.page import page
from shoal.dashboard.run_log import RunLog

PUSH_SECONDS = 0.1
KEEP_ALIVE_SECONDS = 15.0
MOST_LISTENERS = 64
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
JSON = "application/json"


class PageServer(ThreadingHTTPServer):
    """Serves the page of some runs. `url` says where."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, runs: Sequence[RunLog], port: int = 0, token: str = "") -> None:
        self.runs = runs
        self.token = token or secrets.token_urlsafe(16)
        self.listeners = threading.Semaphore(MOST_LISTENERS)
        self.closing = threading.Event()
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """The page's address, with the token."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that goes away in the middle is no news, and a traceback would show what was asked for."""
        del request, client_address

    def close(self) -> None:
        """Stop serving, from another thread than the one that serves."""
        self.closing.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout: ClassVar[float] = 30.0  # of a client that sends nothing
    server_version = "shoal"
    sys_version = ""

    def do_GET(self) -> None:
        try:
            self._get()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        del message, explain
        self._send(404 if code in (400, 403, 404, 405, 501) else code, "text/plain", b"")
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        del format, args  # the address has the token in it

    def _get(self) -> None:
        parts = urlsplit(self.path)
        _, _, rest = parts.path.partition("/")
        token, slash, name = rest.partition("/")
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        known = secrets.compare_digest(token.encode(), self.server.token.encode())
        if not known or not slash or host not in _HOSTS:
            self.send_error(404)
            return
        for run in self.server.runs:
            run.asked = monotonic()
        if name == "":
            text, policy = page()
            self._send(200, "text/html; charset=utf-8", text.encode(), policy)
        elif name == "metrics":
            self._send(200, "text/plain; version=0.0.4; charset=utf-8", metrics(self.server.runs).encode())
        elif name == "api/live":
            self._push()
        elif name.startswith("api/"):
            query = dict(parse_qsl(parts.query, max_num_fields=20)) if len(parts.query) < 8192 else {}
            found = answer(self.server.runs, name.removeprefix("api/"), query)
            if found is None:
                self.send_error(404)
            elif isinstance(found, bytes):
                self._send(200, "application/octet-stream", found)
            else:
                self._send(200, JSON, json.dumps(found, allow_nan=False).encode())
        else:
            self.send_error(404)

    def _send(self, code: int, kind: str, body: bytes, policy: str = "default-src 'none'") -> None:
        packs = len(body) > 2000 and kind != "application/octet-stream"
        if packs and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
        else:
            packs = False
        self.send_response(code)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            **({"Content-Encoding": "gzip"} if packs else {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _push(self) -> None:
        """Server-sent events: the runs' versions, whenever one has grown."""
        if not self.server.listeners.acquire(blocking=False):
            self.send_error(503)
            return
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            sent, quiet = "", 0.0
            while not self.server.closing.wait(PUSH_SECONDS):
                now = json.dumps([run.version for run in self.server.runs])
                quiet += PUSH_SECONDS
                if now != sent or quiet > KEEP_ALIVE_SECONDS:
                    self.wfile.write(f"data: {now}\n\n".encode())
                    self.wfile.flush()
                    sent, quiet = now, 0.0
        finally:
            self.server.listeners.release()
