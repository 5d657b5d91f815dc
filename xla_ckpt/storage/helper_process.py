"""Helper process that serves requests: JSON lines over a socket, with a directory's descriptor.

The descriptor keeps the lock of the directory if the parent dies. The first answer reports that the helper is
ready.
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
"""What is told of the output of a program that has ended, at most (bytes)."""

EXIT_WAIT_SECONDS = 1.0
"""Seconds for which a program may take to end that has closed its end of the channel."""


class HelperExited(Exception):  # noqa: N818  # what it means for the caller, the caller knows
    """Why it does nothing any more, and what it has printed last."""


def get_subprocess_env() -> dict[str, str]:
    """Return the environment of a Python that finds what this process would import."""
    try:
        paths = [os.path.abspath(path) for path in sys.path]
    except FileNotFoundError:  # the working directory was removed, and nothing is imported from below it
        paths = [path for path in sys.path if os.path.isabs(path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class HelperProcess:
    """A program that may run. Not safe for several threads."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._output = os.fdopen(os.memfd_create("output of a program"), "w+b", buffering=0)  # no disk can be full
        self._channel, self._child_channel = socket.socketpair()
        self.is_ready = False
        """Whether it is known to take jobs."""

    def start(self) -> None:
        """Start it, and do not wait. OSError if it cannot be started."""
        self._process = subprocess.Popen(  # noqa: S603  # this library's own program
            [sys.executable, "-P", "-m", self._module],
            stdin=self._child_channel.fileno(),
            stdout=self._output,
            stderr=self._output,
            env=get_subprocess_env(),
            cwd="/",  # the program's own may be removed, and must not be kept in use
            start_new_session=True,  # or a terminal's Ctrl-C would end it
        )
        self._child_channel.close()

    def run(self, request: dict[str, Any] | None, directory: int, deadline: float) -> dict[str, Any]:
        """Have it do a job, or with None only wait until it is ready, until a time of `time.monotonic`; its answer.

        Raises:
            ProgramEnded: It has ended, or was killed because there was no answer in time. The job may be done.
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
        """How it has ended; it is killed if that takes longer: a job that it did afterwards nobody would see."""
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
        """Have it end when it has done its job, and do not wait. In a forked child, let go of what is the parent's."""
        for file in (self._channel, self._child_channel, self._output):
            file.close()
        if self._process is not None and self._process.returncode is None:
            self._process.returncode = 0  # or Python warns that it still runs


def receive_requests(channel: socket.socket) -> Iterator[tuple[dict[str, Any], int]]:
    """In the program: the jobs and their directories, one after the other, until the other end is closed."""
    lines = channel.makefile("rb")
    while True:
        start, descriptors, _, _ = socket.recv_fds(channel, 1, 1)  # the descriptor comes with the first byte
        line = lines.readline() if start else b""
        if not line.endswith(b"\n"):
            return
        try:
            yield json.loads(line), descriptors[0]
        finally:
            os.close(descriptors[0])
