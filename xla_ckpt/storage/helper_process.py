"""Helper process that serves requests: JSON lines over a socket, with a directory's descriptor.

The descriptor keeps the lock of the directory if the parent dies. The first response reports that the helper is ready.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

MAX_OUTPUT_BYTES = 4000
"""Maximum length (bytes) of the output of an exited helper that is included in an error."""

EXIT_WAIT_SECONDS = 1.0
"""Seconds to wait for the exit of a helper that has closed its end of the channel."""


class HelperExited(Exception):  # noqa: N818  # the caller decides if this is an error
    """The helper process has exited. The message contains the reason and its last output."""


def get_subprocess_env() -> dict[str, str]:
    """Return environment variables with which a Python subprocess imports the same modules as this process."""
    try:
        paths = [os.path.abspath(path) for path in sys.path]
    except FileNotFoundError:  # the working directory was removed, so nothing is imported from it
        paths = [path for path in sys.path if os.path.isabs(path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class HelperProcess:
    """A helper process. Not thread-safe.

    Args:
        module: Name of the module that the process runs.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._output = os.fdopen(os.memfd_create("output of a program"), "w+b", buffering=0)  # never on a full disk
        self._channel, self._child_channel = socket.socketpair()
        self.is_ready = False
        """True once the helper has reported that it is ready."""

    def start(self) -> None:
        """Start the process without waiting for it.

        Raises:
            OSError: The process cannot be started.
        """
        self._process = subprocess.Popen(  # noqa: S603  # this library's own program
            [sys.executable, "-P", "-m", self._module],
            stdin=self._child_channel.fileno(),
            stdout=self._output,
            stderr=self._output,
            env=get_subprocess_env(),
            cwd="/",  # not the current directory, which may be removed and must not be kept in use
            start_new_session=True,  # so that Ctrl-C in a terminal does not stop it
        )
        self._child_channel.close()

    def run(self, request: dict[str, Any] | None, directory: int, deadline: float) -> dict[str, Any]:
        """Send a request and return the response. With None, only wait until the helper is ready.

        Args:
            request: The request, serializable as JSON.
            directory: Descriptor of the directory, which is sent with the request.
            deadline: Time limit, as a value of `time.monotonic`.

        Raises:
            HelperExited: The process has exited, or was killed because it did not respond in time. It may have
                completed the request.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", directory))]
        try:
            answer = {} if self.is_ready else self._read_answer(deadline)
            self.is_ready = True
            if request is not None:
                self._channel.settimeout(max(deadline - time.monotonic(), 0.001))
                self._channel.sendmsg([b" "], rights, socket.MSG_NOSIGNAL)
                self._channel.sendall(json.dumps(request).encode() + b"\n", socket.MSG_NOSIGNAL)
                answer = self._read_answer(deadline)
        except (OSError, EOFError) as error:
            raise HelperExited(
                self._describe_exit(EXIT_WAIT_SECONDS if not isinstance(error, TimeoutError) else 0)
            ) from error
        return answer

    def _read_answer(self, deadline: float) -> Any:
        text = b""
        while not text.endswith(b"\n"):
            self._channel.settimeout(max(deadline - time.monotonic(), 0.001))
            part = self._channel.recv(1 << 16)
            if not part:
                raise EOFError
            text += part
        return json.loads(text)

    def _describe_exit(self, seconds: float) -> str:
        """Return how the process exited, after killing it if it runs longer than `seconds`.

        A request that it completed afterwards would go unnoticed.
        """
        assert self._process is not None
        try:
            problem = f"it ended with exit code {self._process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            problem = "it did not answer in time, and was killed"
        end = os.fstat(self._output.fileno()).st_size
        output = os.pread(self._output.fileno(), MAX_OUTPUT_BYTES, max(end - MAX_OUTPUT_BYTES, 0)).decode(
            errors="replace"
        )
        self.close()
        return f"{problem}\n{output}".strip()

    def close(self) -> None:
        """Let the process exit after its current request, without waiting. In a forked child, only close the
        descriptors.
        """
        for file in (self._channel, self._child_channel, self._output):
            file.close()
        if self._process is not None and self._process.returncode is None:
            self._process.returncode = 0  # otherwise Python warns that it is still running


def receive_requests(channel: socket.socket) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield requests and directory descriptors in the helper process, one by one, until the other end is closed."""
    lines = channel.makefile("rb")
    while True:
        start, descriptors, _, _ = socket.recv_fds(channel, 1, 1)  # the descriptor arrives with the first byte
        line = lines.readline() if start else b""
        if not line.endswith(b"\n"):
            return
        try:
            yield json.loads(line), descriptors[0]
        finally:
            os.close(descriptors[0])
