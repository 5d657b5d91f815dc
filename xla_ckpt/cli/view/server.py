"""Web site of a root directory, and the HTTP server that serves it to a browser on this machine.

Pages are read through the public functions at each request, so they are always current. The server listens on the
loopback address only, under a secret URL.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from xla_ckpt.cli.view.pages import (
    CONTENT_SECURITY_POLICY,
    Page,
    PageRenderer,
    Query,
    render_document,
    render_single_document,
)
from xla_ckpt.conversion.diff import Difference, diff
from xla_ckpt.conversion.explain import explain
from xla_ckpt.errors import CheckpointError, UsageError
from xla_ckpt.formats.tags import check_root_exists, make_not_found_error
from xla_ckpt.inspection.checkpoints import Checkpoints
from xla_ckpt.inspection.tags import locate_checkpoint, summarize_roots_below, to_plain_json
from xla_ckpt.loading.compare import ArrayDiff
from xla_ckpt.rendering.formatting import format_bytes
from xla_ckpt.storage.resolve import open_store

MAX_TIMED_TAGS = 200
"""Number of tags, the newest ones, whose save reports are read for the first page."""

MAX_COMPARED_BYTES = 1 << 30
"""Maximum number of array bytes that a page compares, because a browser does not wait for terabytes."""

MAX_DOCUMENT_TAGS = 10
"""Number of tags, the newest ones, that have a page in a single document."""


class CheckpointSite:
    """Pages of one root directory, read at each request, so that they are always current.

    Args:
        path: Root directory; or a tag or a file, whose page is then the first page.
        tag: Tag to show if `path` is a root; None shows all of them.
        about: Arguments of `show` for tags of other libraries whose files lack this information.
    """

    def __init__(self, path: str, tag: str | None = None, **hints: Any) -> None:
        store, self.single_tag = locate_checkpoint(path, tag)
        if self.single_tag is None:
            check_root_exists(store)
        self.root = Checkpoints(store.path)
        self.hints = hints

    def render_page(self, query: Query, renderer: PageRenderer) -> Page:
        """Render the requested page.

        Raises:
            CheckpointError: The data cannot be read, or the query is invalid.
        """
        tag = query.get("tag") or self.single_tag
        match query.get("page", ""):
            case "" if self.single_tag is None:
                return self._render_root(renderer)
            case "" | "tag":
                return self._render_tag(tag, query.get("leaf") or None, renderer)
            case "array":
                sample = self.root.sample(query.get("leaf", ""), tag, **self.hints)
                return renderer.render_array(sample.to_json())
            case "save":
                return renderer.render_save(self.root.timings(tag))
            case "plan":
                text = query.get("mesh", "")
                return renderer.render_plan(explain(self.root.path, tag, mesh=text, **self.hints).to_json())
            case "compare":
                return self._render_comparison(query, renderer)
        raise UsageError("there is no such page", found=query["page"][:80])

    def render_single_document(self, query: Query) -> bytes:
        """Render the first page, the newest tags and their saves in one document.

        Args:
            query: Further contents: the arrays of the newest tag that match a pattern (`leaf`), the plan of a restore
                on a mesh (`mesh`), and the differences from another tag (`a`).

        Raises:
            CheckpointError: There is no tag for the further contents, or the plan or the comparison fails.
        """
        tags = self.root.tags()[-MAX_DOCUMENT_TAGS:][::-1] if self.single_tag is None else [self.single_tag]
        if query and not tags:
            raise make_not_found_error(open_store(self.root.path), None)
        timed = self._load_timings(tags)
        addresses: list[Query] = [] if self.single_tag is not None else [{}]
        for tag in tags:
            addresses += [{"page": "tag", "tag": tag}] + ([{"page": "save", "tag": tag}] if tag in timed else [])
        if "leaf" in query:
            contents = self.root.show(tags[0], leaf=query["leaf"], **self.hints)
            addresses += [{"page": "array", "tag": tags[0], "leaf": array.leaf} for array in contents.arrays]
        asked: list[Query] = []
        if "mesh" in query:
            asked.append({"page": "plan", "tag": tags[0], "mesh": query["mesh"]})
        if "a" in query:
            asked.append({"page": "compare", "a": query["a"], "b": tags[0], "leaf": query.get("leaf", "")})
        names = {frozenset(item.items()): f"page-{number}" for number, item in enumerate([*addresses, *asked])}

        def href(target: Query) -> str | None:
            name = names.get(frozenset(target.items()))
            return None if name is None else f"#{name}"

        pages = PageRenderer(href=href, heading_level=2, interactive=False)
        # One damaged tag does not hide the others. A tag given by name must exist.
        page = self.render_page_or_problem if self.single_tag is None else self.render_page
        shown = [page(item, pages) for item in addresses] + [self.render_page(item, pages) for item in asked]
        return render_single_document(f"Checkpoints in {self.root.path}", list(zip(names.values(), shown, strict=True)))

    def render_page_or_problem(self, query: Query, renderer: PageRenderer) -> Page:
        """Render the requested page, or its error message, so that a damaged tag does not hide the others."""
        try:
            return self.render_page(query, renderer)
        except CheckpointError as error:
            return renderer.render_problem(str(error))

    def _render_root(self, renderer: PageRenderer) -> Page:
        tags = [to_plain_json(summary) for summary in self.root.summaries()]
        timed = self._load_timings([tag["tag"] for tag in tags[-MAX_TIMED_TAGS:]])
        return renderer.render_root(
            self.root.path, tags, timed, summarize_roots_below(self.root.path, {tag["tag"] for tag in tags})
        )

    def _load_timings(self, tags: list[str]) -> dict[str, dict[str, Any]]:
        """Return the timings of the ranks, for tags that contain them."""
        timed = {}
        for tag in tags:
            try:
                timed[tag] = self.root.timings(tag)
            except CheckpointError:
                continue  # no report, or a damaged one: the tag's own page shows the problem
        return timed

    def _render_tag(self, tag: str | None, leaf: str | None, renderer: PageRenderer) -> Page:
        contents = self.root.show(tag, leaf=leaf, **self.hints)
        try:
            self.root.timings(contents.tag)
        except UsageError:  # no report
            return renderer.render_tag(contents.to_json(), has_report=False)
        except CheckpointError:
            pass  # damaged, which its own page reports
        return renderer.render_tag(contents.to_json(), has_report=True)

    def _render_comparison(self, query: Query, renderer: PageRenderer) -> Page:
        leaf = query.get("leaf") or None
        contents = self.root.show(query.get("a"), leaf=leaf, **self.hints)
        nbytes = sum(array.nbytes for array in contents.arrays)
        if nbytes > MAX_COMPARED_BYTES:
            raise UsageError(
                "a page compares fewer bytes",
                expected=f"at most {format_bytes(MAX_COMPARED_BYTES)}",
                found=format_bytes(nbytes),
                hint="Say which leaves, or run xla-ckpt diff.",
            )
        path = self.root.path
        difference = diff(path, path, query.get("a"), query.get("b"), leaf=leaf, **self.hints)
        return renderer.render_comparison(
            difference.to_json(), {k: how.to_json() for k, how in _sum_by_layer(difference).items()}
        )


def _sum_by_layer(difference: Difference) -> Mapping[str, ArrayDiff]:
    """Return the sum of the changed arrays for each layer, or each part of the state if names contain no number."""
    layers: dict[str, ArrayDiff] = {}
    for leaf, how in difference.moved.items():
        layers[get_layer_name(leaf)] = layers.get(get_layer_name(leaf), ArrayDiff()) + how
    return layers


def get_layer_name(leaf: str) -> str:
    """Return the layer that an array belongs to: its name up to and including the first number.

    >>> get_layer_name("model/layers.12.mlp.up.weight"), get_layer_name("model/norm.weight"), get_layer_name("a/0.w/b")
    ('model/layers.12', 'model', 'a/0')
    """
    taken = ""
    for part in leaf.replace("/", "/ ").replace(".", ". ").split(" "):
        taken += part
        if part.rstrip("/.").isdigit():
            return taken.rstrip("/.")
    return leaf.split("/", maxsplit=1)[0]


LOOPBACK = "127.0.0.1"

ALLOWED_HOSTS = frozenset({LOOPBACK, "localhost"})
"""Host names of this machine in a browser. Other host names are rejected, which prevents DNS rebinding."""

IDLE_TIMEOUT_SECONDS = 20.0
"""Seconds after which an idle connection is closed."""

HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"{CONTENT_SECURITY_POLICY}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class ViewServer(ThreadingHTTPServer):
    """HTTP server for the pages of a site, under a secret URL.

    Each connection has a thread, because browsers open connections that they do not use. Pages are read sequentially.

    Args:
        site: The pages.
        port: Port number; 0 selects a free one.

    Raises (on construction):
        OSError: The port is in use.
    """

    daemon_threads = True

    def __init__(self, site: CheckpointSite, port: int = 0) -> None:
        super().__init__((LOOPBACK, port), _RequestHandler)
        self.site = site
        self.token = secrets.token_urlsafe(24)
        self.read_lock = threading.Lock()

    @property
    def url(self) -> str:
        """URL of the first page."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/{self.token}/"


def build_url_query(query: Query) -> str:
    """Return the relative link to a page. Names in a tag may contain surrogates.

    >>> build_url_query({"page": "tag", "tag": "a&b"}), build_url_query({})
    ('?page=tag&tag=a%26b', '?')
    """
    return f"?{urlencode(query, errors='surrogatepass')}"


class _RequestHandler(BaseHTTPRequestHandler):
    """Handler of one request. The base class rejects methods other than GET."""

    server: ViewServer
    timeout = IDLE_TIMEOUT_SECONDS

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in ALLOWED_HOSTS or not hmac.compare_digest(url.path.encode(), f"/{self.server.token}/".encode()):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            address = dict(parse_qsl(url.query, errors="surrogatepass", max_num_fields=10))
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        with self.server.read_lock:
            page = self.server.site.render_page_or_problem(address, PageRenderer(href=build_url_query))
        body = render_document(page.title, page.body, home=build_url_query({}))
        self.send_response(HTTPStatus.OK)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "xla-ckpt"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # its name in the base class
        """Log nothing, because the URL contains the secret token."""
