"""The server of ``xla-ckpt view``: for a browser of this machine, and of the person who started it, alone."""

from __future__ import annotations

import hmac
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from xla_ckpt.view.document import CONTENT_POLICY, document
from xla_ckpt.view.pages import Address, Pages
from xla_ckpt.view.site import ViewedRoot

LOOPBACK = "127.0.0.1"

HOSTS = frozenset({LOOPBACK, "localhost"})
"""What a browser calls this machine. A page of another name that leads here (DNS rebinding) is not answered."""

SILENT_SECONDS = 20.0
"""How long a connection may be silent."""

HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"{CONTENT_POLICY}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class ViewServer(ThreadingHTTPServer):
    """Answers with the pages of a site, under an address that nobody can guess.

    Connections have threads, as browsers open some that they do not use; pages are read one after another.

    Args:
        site: The pages.
        port: 0 takes any that is free.

    Raises (on construction):
        OSError: The port is taken.
    """

    daemon_threads = True

    def __init__(self, site: ViewedRoot, port: int = 0) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.site = site
        self.token = secrets.token_urlsafe(24)
        self.reading = threading.Lock()

    @property
    def address(self) -> str:
        """The address of the first page."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/{self.token}/"


def query_of(address: Address) -> str:
    """The link to a page from any other one. Names in a tag may have halves of surrogate pairs.

    >>> query_of({"page": "tag", "tag": "a&b"}), query_of({})
    ('?page=tag&tag=a%26b', '?')
    """
    return f"?{urlencode(address, errors='surrogatepass')}"


class _Handler(BaseHTTPRequestHandler):
    """One request. Methods other than GET are refused by the base class."""

    server: ViewServer
    timeout = SILENT_SECONDS

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in HOSTS or not hmac.compare_digest(url.path.encode(), f"/{self.server.token}/".encode()):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            address = dict(parse_qsl(url.query, errors="surrogatepass", max_num_fields=10))
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        with self.server.reading:
            page = self.server.site.page_or_problem(address, Pages(href=query_of))
        body = document(page.title, page.body, home=query_of({}))
        self.send_response(HTTPStatus.OK)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "xla-ckpt"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # its name in the base class
        """Nothing: the address has the token in it."""
