"""A server that answers as S3 does (moto), whose answers can be spoilt: for tests, and as a program of its own.

python -m tests.buckets.s3_server PORT
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from queue import SimpleQueue
from typing import Any

REFUSALS = {
    "before503": ("503 Slow Down", "SlowDown"),
    "refuse403": ("403 Forbidden", "AccessDenied"),
    "refuse409": ("409 Conflict", "ConditionalRequestConflict"),
    "expired": ("400 Bad Request", "ExpiredToken"),
    "skewed": ("403 Forbidden", "RequestTimeTooSkewed"),
    "unknown_key": ("403 Forbidden", "InvalidAccessKeyId"),
    "wrong_secret": ("403 Forbidden", "SignatureDoesNotMatch"),
    "redirect": ("301 Moved Permanently", "PermanentRedirect"),
    "region": ("400 Bad Request", "AuthorizationHeaderMalformed"),
    "no_store": ("404 Not Found", ""),
}
"""Answers to requests that are not done, with the codes that S3 gives them; without a code it is a web page."""

LOST = {"after503": REFUSALS["before503"], "after500": ("500 Internal Error", "InternalError")}
"""Answers to requests that are done, and that say that they are not."""


@dataclass
class Fault:
    """What happens to the next requests that it is for."""

    method: str
    """With "" it is for all."""

    part: str
    """It is for requests whose path and query contain this."""

    kind: str
    """One of `REFUSALS` or `LOST`, or: ``drop``: it is done, and never answered. ``kill``: likewise, and its client is
    killed. ``cut``: half of the body comes. ``slow``: the answer comes after `seconds`. ``keep``: files that are to be
    deleted stay, as S3 says where a user may not delete them: in the body of an answer that says 200. ``page``: a web
    page comes.
    """

    count: int = 1
    seconds: float = 0.0
    number: int = 0
    """It is for requests from this one on, counted from 1 since `S3Server.forget`."""

    clients: SimpleQueue[int] = field(default_factory=SimpleQueue)
    """The process that ``kill`` kills."""


@dataclass(frozen=True)
class Request:
    """A request that was answered, or was not."""

    method: str
    path: str
    """With the query."""

    status: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass
class S3Server:
    """The server, on a port of this machine."""

    port: int = 0
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    asked: int = 0
    """Requests that came since `forget`."""

    def __post_init__(self) -> None:
        # Here, because ranks import this module with those of their tests, and need none of it.
        from moto.server import create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._app = create_backend_app("s3")  # moto's choice by the host's name takes a third of a request
        self._lock = threading.Lock()
        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True)
        self.port = self._server.port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process has in its environment that uses it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
        }

    def new_bucket(self) -> str:
        """Make a bucket; its name."""
        return str(self.bucket(f"bucket-{uuid.uuid4().hex[:12]}").name)

    def bucket(self, name: str) -> Any:
        """Make a bucket, as boto3 has it."""
        return self._boto3.create_bucket(Bucket=name)

    @cached_property
    def _boto3(self) -> Any:
        import boto3

        keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
        return boto3.resource("s3", endpoint_url=self.url, **keys)

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._thread.join()

    def forget(self) -> None:
        """Have no faults and no requests, and count them from 1 again."""
        with self._lock:
            self.faults.clear()
            self.requests.clear()
            self.asked = 0

    def _fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.asked += 1
            for fault in self.faults:
                its = fault.method in ("", method) and fault.part in path and self.asked >= fault.number
                if fault.count > 0 and its:
                    fault.count -= 1
                    return fault
        return None

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
        path = environ["PATH_INFO"] + (f"?{query}" if query else "")
        headers = {name[5:].lower(): value for name, value in environ.items() if name.startswith("HTTP_")}
        fault = self._fault(method, path)
        kind = fault.kind if fault is not None else ""

        def answered(status: str, body: bytes) -> Iterable[bytes]:
            start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            self.requests.append(Request(method, path, f"{status[:3]} {kind}", headers))
            return [body]

        if kind in REFUSALS or kind in ("page", "keep"):
            sent = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            if kind == "keep":
                names = re.findall("<Key>.*?</Key>", sent.decode())
                code = "<Code>AccessDenied</Code><Message>on purpose</Message>"
                errors = "".join(f"<Error>{name}{code}</Error>" for name in names)
                return answered("200 OK", f"<DeleteResult>{errors}</DeleteResult>".encode())
            return answered(*_refusal(kind))
        if fault is not None and kind == "slow":
            time.sleep(fault.seconds)
        seen: dict[str, Any] = {}

        def note(status: str, headers: list[tuple[str, str]], _: Any = None) -> Callable[[bytes], None]:
            seen.update(status=status, headers=headers)
            return lambda _: None

        body = b"".join(self._app(environ, note))
        if kind in LOST:
            return answered(*_refusal(kind))
        self.requests.append(Request(method, path, f"{seen['status'][:3]} {kind}".strip(), headers))
        if fault is not None and kind == "kill":
            os.kill(fault.clients.get(timeout=10), signal.SIGKILL)
        if kind in ("drop", "kill"):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError("the answer is lost on purpose")
        start(seen["status"], seen["headers"])
        return [body[: len(body) // 2] if kind == "cut" else body]


def _refusal(kind: str) -> tuple[str, bytes]:
    """Status and body of an answer."""
    status, code = {**REFUSALS, **LOST, "page": ("200 OK", "")}[kind]
    if not code:
        return status, b"<html><body>It works!</body></html>"
    return status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>on purpose</Message></Error>".encode()


if __name__ == "__main__":
    server = S3Server()
    bucket = f"s3://{server.new_bucket()}"
    program = [word.replace("{bucket}", bucket) for word in sys.argv[1:]]
    sys.exit(subprocess.run(program, env={**os.environ, **server.environment}).returncode)
