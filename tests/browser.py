"""A headless Chromium over the pipe of its debugging protocol: enough to open a page, look at it and listen to it."""

import fcntl
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)


class Page:
    """A tab: `errors` and `requests` collect what it says and asks for."""

    def __init__(self, read: int, write: int) -> None:
        self._in, self._out, self._last, self._session = os.fdopen(read, "rb"), os.fdopen(write, "wb"), 0, None
        self._buffer = b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something and wait for its answer."""
        self._last += 1
        number, message = self._last, {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            event = self._receive()
            if event.get("id") == number:
                assert "error" not in event, event
                return event["result"]

    def open(self, url: str, width: int, height: int = 900, **media: str) -> None:
        """Open a page in a window of some width, with media features such as prefers_color_scheme="dark"."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        self.send("Emulation.setEmulatedMedia", features=features)
        self._loaded = False
        self.send("Page.navigate", url=url)
        while not self._loaded:
            self._receive()
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._in.fileno(), 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        event = json.loads(message)
        match event.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(str(event["params"]["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.errors.append(str(event["params"]["args"]))
            case "Log.entryAdded":
                self.errors.append(str(event["params"]["entry"]))
        return event


@contextmanager
def browser() -> Iterator[Page]:
    """A Chromium of its own, ended afterwards."""
    assert CHROMIUM
    read, their_write = os.pipe()
    their_read, write = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4: ours go far away first, so that neither overwrites the other.
    far = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 50) for one in (their_read, their_write)]
    silent = [(os.POSIX_SPAWN_OPEN, one, os.devnull, os.O_WRONLY, 0) for one in (1, 2)]
    actions = [*silent, (os.POSIX_SPAWN_DUP2, far[0], 3), (os.POSIX_SPAWN_DUP2, far[1], 4)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        arguments = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}"]
        process = os.posix_spawn(CHROMIUM, arguments, os.environ, file_actions=actions)
        for one in (their_read, their_write, *far):
            os.close(one)
        try:
            yield Page(read, write)
        finally:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
