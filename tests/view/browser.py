"""A real Chromium without a window, over the pipe that it has for tools. `XLA_CKPT_CHROMIUM` names its program.

A headless shell will do, such as the one in npm's @sparticuz/chromium. Its arguments may follow the program.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

CHROMIUM = shlex.split(os.environ.get("XLA_CKPT_CHROMIUM", ""))
"""The program and its arguments; empty where there is none."""

ARGUMENTS = ("--headless", "--no-sandbox", "--no-zygote", "--disable-gpu", "--in-process-gpu",
             "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe", "about:blank")  # fmt: skip


class Browser:
    """One page of a browser."""

    def __init__(self, reads: IO[bytes], writes: IO[bytes]) -> None:
        self._reads, self._writes = reads, writes
        self._number, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []
        """What the browser told by itself: errors of the page, among others."""
        self._session: str | None = None
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the DevTools protocol; its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._writes.write(json.dumps(message).encode() + b"\0")
        self._writes.flush()
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, url: str, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Go to a page, on a screen of this size, and wait until it is there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript, in the page."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true, on this page or on the one that it leads to."""
        while not self.run(script):
            self.events.append(self._next())

    def picture(self, *, whole: bool = True) -> bytes:
        """What the page looks like, as PNG."""
        shown = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shown["data"])

    def problems(self) -> list[str]:
        """What the browser complained about: scripts and contents that its policy refused, errors of scripts."""
        entries = [e["params"]["entry"] for e in self.events if e.get("method") == "Log.entryAdded"]
        thrown = [e["params"] for e in self.events if e.get("method") == "Runtime.exceptionThrown"]
        return [entry["text"] for entry in entries if "favicon" not in entry.get("url", "")] + [str(t) for t in thrown]

    def requests(self) -> list[str]:
        """The addresses that the page asked for."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def spoken(self) -> list[tuple[str, str]]:
        """(role, name) of what a screen reader finds."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"] and "role" in node
        ]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not (chunk := os.read(self._reads.fileno(), 1 << 16)):
                raise RuntimeError("the browser has ended")
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser that ends with the block."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()

    def pipes() -> None:  # the browser reads at 3 and writes at 4
        one, other = os.dup(theirs_in), os.dup(theirs_out)
        os.dup2(one, 3)
        os.dup2(other, 4)

    with tempfile.TemporaryDirectory() as profile:
        command = [*CHROMIUM, *ARGUMENTS[:-1], f"--user-data-dir={profile}", ARGUMENTS[-1]]
        process = subprocess.Popen(command, close_fds=False, preexec_fn=pipes, stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            with os.fdopen(ours_in, "rb") as reads, os.fdopen(ours_out, "wb") as writes:
                yield Browser(reads, writes)
        finally:
            process.kill()
            process.wait()
