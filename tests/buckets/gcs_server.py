"""A server that answers as Google Cloud Storage does, as far as obstore and tensorstore ask it.

No package of the registries does. It follows the documentation of the XML API
(https://cloud.google.com/storage/docs/xml-api/reference-methods), and keeps to what matters for a root of tags: each
version of an object has a generation, and ``x-goog-if-generation-match`` is minded by whoever writes one. tensorstore
reads and lists by the JSON API (https://cloud.google.com/storage/docs/json_api/v1/objects). It has no credentials and
keeps everything in memory. That the real service answers alike is not verified.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote
from wsgiref.handlers import format_date_time
from xml.sax.saxutils import escape

from werkzeug.serving import make_server

JSON_API = "v1/b/"
"""Begins the names of what is asked for by the JSON API, below ``storage``."""

MODIFIED = "2026-01-01T00:00:00.000Z"


@dataclass(frozen=True)
class Thing:
    """A version of an object."""

    data: bytes
    generation: int

    @property
    def headers(self) -> list[tuple[str, str]]:
        """What an answer says of it."""
        return [
            ("ETag", f'"{self.generation:032x}"'),
            ("x-goog-generation", str(self.generation)),
            ("Last-Modified", format_date_time(0)),
        ]


@dataclass
class Answer:
    """An answer to one request."""

    status: str = "200 OK"
    body: bytes = b""
    headers: list[tuple[str, str]] = field(default_factory=list)


def refusal(status: str, code: str) -> Answer:
    return Answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())


class GcsServer:
    """The server, on a port of this machine, with one bucket of any name."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self.objects: dict[str, Thing] = {}
        self.authorizations: set[str] = set()
        """The headers of that name that requests had; "" if they had none."""

        self._parts: dict[str, dict[int, bytes]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._server.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process has in its environment that uses it."""
        key = {"gcs_base_url": self.url, "disable_oauth": True}
        key |= {"client_email": "", "private_key": "", "private_key_id": ""}
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key), "GOOGLE_ALLOW_HTTP": "true"}

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._thread.join()

    def _serve(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        path = unquote(environ["PATH_INFO"].encode("latin-1").decode())
        key = path.lstrip("/").partition("/")[2]
        query = {name: values[0] for name, values in parse_qs(environ["QUERY_STRING"], keep_blank_values=True).items()}
        with self._lock:
            self.authorizations.add(environ.get("HTTP_AUTHORIZATION", ""))
            answer = self._answer(environ["REQUEST_METHOD"], key, query, environ, body)
        length = [] if environ["REQUEST_METHOD"] == "HEAD" else [("Content-Length", str(len(answer.body)))]
        start(answer.status, [*answer.headers, *length])
        return [answer.body]

    def _answer(self, method: str, key: str, query: dict[str, str], environ: dict[str, Any], body: bytes) -> Answer:
        if key.startswith(JSON_API) and method == "GET":
            name = key.partition("/o/")[2]
            return self._read(method, name, environ) if name else self._names(query)
        if method == "GET" and not key:
            return self._listing(query)
        if method in ("GET", "HEAD"):
            return self._read(method, key, environ)
        if method == "DELETE":
            if "upload_id" in query or "uploadId" in query:
                self._parts.pop(query.get("uploadId", query.get("upload_id", "")), None)
                return Answer("204 No Content")
            return Answer("204 No Content") if self.objects.pop(key, None) else refusal("404 Not Found", "NoSuchKey")
        if method == "POST" and "uploads" in query:
            upload = f"upload-{next(self._numbers)}"
            self._parts[upload] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return Answer(body=text.encode())
        if method == "PUT" and "partNumber" in query:
            self._parts[query["uploadId"]][int(query["partNumber"])] = body
            return Answer(headers=[("ETag", f'"part-{query["partNumber"]}"')])
        if method == "POST":
            parts = self._parts.pop(query["uploadId"])
            thing = self._put(key, b"".join(parts[number] for number in sorted(parts)))
            text = f'<CompleteMultipartUploadResult><ETag>"{thing.generation}"</ETag></CompleteMultipartUploadResult>'
            return Answer(body=text.encode(), headers=thing.headers)
        return self._write(key, environ, body)

    def _write(self, key: str, environ: dict[str, Any], body: bytes) -> Answer:
        condition = environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH")
        before = self.objects.get(key)
        if condition is not None and int(condition) != (0 if before is None else before.generation):
            return refusal("412 Precondition Failed", "PreconditionFailed")
        if (source := environ.get("HTTP_X_GOOG_COPY_SOURCE")) is not None:
            copied = self.objects.get(unquote(source).lstrip("/").partition("/")[2])
            if copied is None:
                return refusal("404 Not Found", "NoSuchKey")
            body = copied.data
        return Answer(headers=self._put(key, body).headers)

    def _put(self, key: str, data: bytes) -> Thing:
        thing = self.objects[key] = Thing(data, next(self._numbers))
        return thing

    def _read(self, method: str, key: str, environ: dict[str, Any]) -> Answer:
        thing = self.objects.get(key)
        if thing is None:
            return refusal("404 Not Found", "NoSuchKey")
        match = environ.get("HTTP_IF_MATCH")
        if match is not None and match.strip('"') != f"{thing.generation:032x}":
            return refusal("412 Precondition Failed", "PreconditionFailed")
        if method == "HEAD":
            return Answer(headers=[*thing.headers, ("Content-Length", str(len(thing.data)))])
        if (span := environ.get("HTTP_RANGE")) is None:
            return Answer(body=thing.data, headers=thing.headers)
        first, _, last = span.removeprefix("bytes=").partition("-")
        low, high = int(first), min(int(last or len(thing.data) - 1), len(thing.data) - 1)
        if low > high:
            return refusal("416 Range Not Satisfiable", "InvalidRange")
        where = ("Content-Range", f"bytes {low}-{high}/{len(thing.data)}")
        return Answer("206 Partial Content", thing.data[low : high + 1], [*thing.headers, where])

    def _names(self, query: dict[str, str]) -> Answer:
        """All names from one on, and before another one."""
        low, high = query.get("startOffset", ""), query.get("endOffset")
        things = [
            (key, self.objects[key]) for key in sorted(self.objects) if low <= key and (high is None or key < high)
        ]
        items = [{"name": k, "size": str(len(t.data)), "generation": str(t.generation)} for k, t in things]
        body = json.dumps({"kind": "storage#objects", "items": items}).encode()
        return Answer(body=body, headers=[("Content-Type", "application/json")])

    def _listing(self, query: dict[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after, most = query.get("continuation-token", ""), int(query.get("max-keys", "1000"))
        entries: list[str] = []
        last = ""
        for name, text in self._entries(prefix, delimiter):
            if name <= after:
                continue
            if len(entries) == most:
                break
            entries.append(text)
            last = name
        else:
            last = ""
        more = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if last else ""
        return Answer(body=f"<ListBucketResult>{''.join(entries)}{more}</ListBucketResult>".encode())

    def _entries(self, prefix: str, delimiter: str) -> Iterator[tuple[str, str]]:
        folders: set[str] = set()
        for key in sorted(self.objects):
            if not key.startswith(prefix):
                continue
            inner = key[len(prefix) :]
            if delimiter and delimiter in inner:
                folder = prefix + inner.partition(delimiter)[0] + delimiter
                if folder not in folders:
                    folders.add(folder)
                    yield folder, f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
                continue
            thing = self.objects[key]
            size, tag = len(thing.data), f"{thing.generation:032x}"
            facts = f"<LastModified>{MODIFIED}</LastModified><Size>{size}</Size><ETag>{tag}</ETag>"
            yield key, f"<Contents><Key>{escape(key)}</Key>{facts}</Contents>"
