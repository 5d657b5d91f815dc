"""A server that answers as S3 does (moto), whose answers can be spoilt: for tests, and as a program of its own.

python -m tests.buckets.s3_server PORT
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

Kind = Literal["before503", "after503", "after500", "drop", "refuse403", "refuse409", "cut", "slow"]
"""What happens to a request. ``before503`` and the ``refuse`` ones: it is not done. ``after503``, ``after500``: it is
done, and the answer says that it is not. ``drop``: it is done, and never answered. ``cut``: half of the body comes.
``slow``: the answer comes after `Fault.seconds`.
"""

CODES = {
    "before503": ("503 Slow Down", "SlowDown"),
    "after503": ("503 Slow Down", "SlowDown"),
    "after500": ("500 Internal Error", "InternalError"),
    "refuse403": ("403 Forbidden", "AccessDenied"),
    "refuse409": ("409 Conflict", "ConditionalRequestConflict"),
}


@dataclass
class Fault:
    """What happens to the next requests that it is for."""

    method: str
    part: str
    """It is for requests whose path and query contain this."""

    kind: Kind
    count: int = 1
    seconds: float = 0.0


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

    def __post_init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._app = DomainDispatcherApplication(create_backend_app)
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
        import boto3

        names = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        boto3.client("s3", endpoint_url=self.url, **names).create_bucket(Bucket=name)
        return name

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._thread.join()

    def _fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.count > 0 and fault.method == method and fault.part in path:
                    fault.count -= 1
                    return fault
        return None

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
        path = environ["PATH_INFO"] + (f"?{query}" if query else "")
        headers = {name[5:].lower(): value for name, value in environ.items() if name.startswith("HTTP_")}
        fault = self._fault(method, path)
        kind = fault.kind if fault is not None else ""
        if fault is not None and kind == "slow":
            time.sleep(fault.seconds)
        if kind in ("before503", "refuse403", "refuse409"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return self._refuse(method, path, kind, start)
        seen: dict[str, Any] = {}

        def note(status: str, headers: list[tuple[str, str]], _: Any = None) -> Callable[[bytes], None]:
            seen.update(status=status, headers=headers)
            return lambda _: None

        body = b"".join(self._app(environ, note))
        if kind in ("after503", "after500"):
            return self._refuse(method, path, kind, start)
        self.requests.append(Request(method, path, f"{seen['status'][:3]} {kind}".strip(), headers))
        if kind == "drop":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError("the answer is lost on purpose")
        start(seen["status"], seen["headers"])
        return [body[: len(body) // 2] if kind == "cut" else body]

    def _refuse(self, method: str, path: str, kind: str, start: Callable[..., Any]) -> Iterable[bytes]:
        status, code = CODES[kind]
        self.requests.append(Request(method, path, f"{status[:3]} {kind}"))
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>on purpose</Message></Error>".encode()
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]


if __name__ == "__main__":
    server = S3Server()
    bucket = f"s3://{server.new_bucket()}"
    program = [word.replace("{bucket}", bucket) for word in sys.argv[1:]]
    sys.exit(subprocess.run(program, env={**os.environ, **server.environment}).returncode)
