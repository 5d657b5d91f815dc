"""A server that answers as S3 does, as fast as Python can: for measuring clients. Bodies lie in memory, and go with it.

    python benchmarks/sink_s3.py PORT

It knows what obstore, boto3, s3fs and s3torchconnector ask for: PUT, also on a condition and in parts, GET and HEAD
with ranges, copies, lists, and deletions. It checks no signature and no checksum. ``GET /.requests`` is no request of
S3's: it says how many of each method came since it was asked last, as JSON.

It ends when its standard input does, so that it does not outlive who has started it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import sys
import threading
from collections import Counter
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

Body = list[memoryview]
"""The parts of a file, in their order."""

DATE, ISO_DATE = "Mon, 23 Nov 2026 12:00:00 GMT", "2026-11-23T12:00:00.000Z"
_KEY = re.compile(rb"<Key>(.*?)</Key>")


class Sink:
    """The files, by bucket and name."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[str, Body]] = {}
        self.uploads: dict[str, dict[int, memoryview]] = {}
        self.lock = threading.Lock()
        self.numbers = itertools.count(1)
        self.asked = Counter[str]()

    def put(self, key: str, body: Body, headers: dict[str, str]) -> tuple[int, str]:
        """(status, entity tag) of a write."""
        with self.lock:
            there = self.files.get(key)
            if headers.get("if-none-match") == "*" and there is not None:
                return 412, ""
            if "if-match" in headers and (there is None or there[0] != headers["if-match"]):
                return 412, ""
            tag = f'"{next(self.numbers)}"'
            self.files[key] = tag, body
        return 200, tag

    def names(self, bucket: str, query: dict[str, str]) -> bytes:
        """The answer to a list. It has one page."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        with self.lock:
            found = sorted((key[len(bucket) :], file) for key, file in self.files.items() if key.startswith(bucket))
        contents, common = [], dict[str, None]()
        for name, (tag, body) in found:
            if not name.startswith(prefix):
                continue
            if delimiter and delimiter in name[len(prefix) :]:
                common[prefix + name[len(prefix) :].partition(delimiter)[0] + delimiter] = None
                continue
            size = sum(map(len, body))
            contents.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>{ISO_DATE}</LastModified>"
                f"<ETag>{escape(tag)}</ETag><Size>{size}</Size></Contents>"
            )
        folders = [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in common]
        text = "".join((*contents, *folders))
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{text}</ListBucketResult>".encode()

    def serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = bytearray()
        while True:
            while (end := head.find(b"\r\n\r\n")) < 0:
                got = connection.recv(65536)
                if not got:
                    return
                head += got
            lines = bytes(head[:end]).decode("latin1").split("\r\n")
            rest = head[end + 4 :]
            method, target, _ = lines[0].split(" ")
            headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines[1:])}
            path, _, text = target.partition("?")
            if path != "/.requests":
                self.asked[method] += 1
            query = {name: values[0] for name, values in parse_qs(text, keep_blank_values=True).items()}
            size = int(headers.get("content-length", 0))
            if headers.get("expect", "").lower() == "100-continue" and len(rest) < size:
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            data = memoryview(bytearray(size))
            done = min(len(rest), size)
            data[:done], head = rest[:done], rest[done:]
            while done < size:
                done += connection.recv_into(data[done:])
            status, extra, body = self.answer(method, unquote(path).lstrip("/"), query, headers, data)
            length = sum(map(len, body))
            if method == "HEAD":
                body = []
            connection.sendall(f"HTTP/1.1 {status} x\r\nContent-Length: {length}\r\n{extra}\r\n".encode())
            for part in body:
                connection.sendall(part)

    def answer(
        self, method: str, key: str, query: dict[str, str], headers: dict[str, str], data: memoryview
    ) -> tuple[int, str, Body]:
        """(status, headers, body) of an answer."""
        if key == ".requests":
            told, self.asked = json.dumps(self.asked), Counter()
            return 200, "", [memoryview(told.encode())]
        bucket = key.partition("/")[0] + "/"
        if method == "POST" and "uploads" in query:
            name = str(next(self.numbers))
            self.uploads[name] = {}
            return 200, "", _xml(f"<UploadId>{name}</UploadId>", "InitiateMultipartUploadResult")
        if method == "PUT" and "partNumber" in query:
            self.uploads[query["uploadId"]][int(query["partNumber"])] = data
            return 200, 'ETag: "p"\r\n', []
        if method == "POST" and "uploadId" in query:
            parts = self.uploads.pop(query["uploadId"])
            _, tag = self.put(key, [parts[number] for number in sorted(parts)], headers)
            return 200, "", _xml(f"<ETag>{escape(tag)}</ETag>", "CompleteMultipartUploadResult")
        if method == "POST":
            names = [bucket + name.decode() for name in _KEY.findall(bytes(data))]
            with self.lock:
                for name in names:
                    self.files.pop(name, None)
            deleted = "".join(f"<Deleted><Key>{escape(name.partition('/')[2])}</Key></Deleted>" for name in names)
            return 200, "", _xml(deleted, "DeleteResult")
        if method == "PUT" and "x-amz-copy-source" in headers:
            source = self.files.get(unquote(headers["x-amz-copy-source"]).lstrip("/"))
            if source is None:
                return 404, "", []
            _, tag = self.put(key, source[1], headers)
            return (
                200,
                "",
                _xml(f"<LastModified>{ISO_DATE}</LastModified><ETag>{escape(tag)}</ETag>", "CopyObjectResult"),
            )
        if method == "PUT":
            status, tag = self.put(key, [data], headers)
            return status, f"ETag: {tag}\r\n" if tag else "", []
        if method == "DELETE":
            self.files.pop(key, None)
            return 204, "", []
        if "list-type" in query:
            return 200, "", [memoryview(self.names(bucket, query))]
        if (file := self.files.get(key)) is None:
            return 404, "", []
        tag, body = file
        size = sum(map(len, body))
        extra = f"ETag: {tag}\r\nLast-Modified: {DATE}\r\n"
        if "range" not in headers:
            return 200, extra, list(body)
        first, last = headers["range"].removeprefix("bytes=").split("-")
        start, stop = int(first), min(int(last) + 1 if last else size, size)
        if start >= size:
            return 416, "", []
        return 206, f"{extra}Content-Range: bytes {start}-{stop - 1}/{size}\r\n", _part(body, start, stop)


def _part(body: Body, start: int, stop: int) -> Body:
    found, at = [], 0
    for part in body:
        piece = part[max(start - at, 0) : max(stop - at, 0)]
        found += [piece] if len(piece) else []
        at += len(part)
    return found


def _xml(text: str, name: str) -> Body:
    return [memoryview(f"<{name}>{text}</{name}>".encode())]


if __name__ == "__main__":
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    listening, sink = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128), Sink()
    print(listening.getsockname()[1], flush=True)
    while True:
        accepted, _ = listening.accept()
        threading.Thread(target=sink.serve, args=(accepted,), daemon=True).start()
