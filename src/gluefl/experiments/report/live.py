"""The live page of running experiments: served on this machine only, rendered again when a journal has grown."""

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from gluefl.errors import UsageError
from gluefl.experiments.report.comparison import read
from gluefl.experiments.report.page import render
from gluefl.experiments.runs import find
from gluefl.storage.names import CONFIG, FAILURE, JOURNAL, SUMMARY


class Watch:
    """The current page of the given folders, rendered on request if a file has changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders, self._lock = folders, threading.Lock()
        self._version, self._page, self._next_s = "", "", 0.0

    def newest(self) -> tuple[str, str]:
        """Version and page."""
        with self._lock:
            if time.monotonic() >= self._next_s:
                began, folders = time.monotonic(), [folder for folder in self._folders if folder.is_dir()]
                version = fingerprint(folders)
                if version != self._version:
                    self._version, self._page = version, render(read(folders), version)
                # Reading large journals takes time: use at most a fifth of it, the runs need the processor.
                self._next_s = time.monotonic() + 4 * (time.monotonic() - began)
            return self._version, self._page


def fingerprint(folders: Sequence[Path]) -> str:
    """A text that changes whenever a file of a run changes."""
    digest = hashlib.sha256()
    for run in find(folders):
        for name in (JOURNAL, SUMMARY, CONFIG, FAILURE):
            if (run / name).exists():
                state = (run / name).stat()
                digest.update(f"{run}/{name} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


@contextmanager
def serving(folders: Sequence[Path], port: int) -> Iterator[str]:
    """Serve the page of the given folders from a thread; yields its address. Port 0 takes any free port."""
    watch = Watch(folders)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Prevents DNS rebinding: a page of another site must not read this one through a host name of its own.
            if (self.headers.get("Host") or "").rsplit(":", 1)[0] not in ("127.0.0.1", "localhost"):
                self.send_error(403)
            elif self.path == "/":
                self._answer(watch.newest()[1], "text/html; charset=utf-8")
            elif self.path == "/version":
                self._answer(watch.newest()[0], "text/plain")
            else:
                self.send_error(404)

        def _answer(self, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Requests are not logged."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--port {port} cannot be used: {error}. Choose another, or 0 for any free one.") from error
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
