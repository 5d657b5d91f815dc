"""The pages in a real Chromium, on a desktop and on a phone: nothing runs, nothing is fetched, all can be reached.

It needs a Chromium that `XLA_CKPT_CHROMIUM` names (tests/README.md).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import xla_ckpt
from tests.pages import HOSTILE
from tests.view import demo
from tests.view.browser import CHROMIUM, Browser, browser
from tests.view.test_pages import hostile  # noqa: F401  # a fixture
from xla_ckpt.cli.view.server import CheckpointSite, ViewServer, build_url_query

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="XLA_CKPT_CHROMIUM names no Chromium")

WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as it:
        yield it


def served(root: Path) -> Iterator[str]:
    with ViewServer(CheckpointSite(str(root))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("plain")
    demo.make(root)
    yield from served(root)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", demo.PAGES)
def test_each_page_fits_and_is_spoken(name: str, width: int, plain: str, chromium: Browser) -> None:
    chromium.open(plain + build_url_query(demo.PAGES[name]), width)
    assert chromium.problems() == []
    assert {request.split("?")[0] for request in chromium.requests()} == {plain}
    assert chromium.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert chromium.run("getComputedStyle(document.body).maxWidth") == "1216px"  # its style is in force
    spoken = chromium.spoken()
    roles = {role for role, _ in spoken}
    assert {"main", "banner", "navigation", "heading", "link"} <= roles
    for role in ("image", "textbox", "combobox", "button", "link", "heading"):
        assert all(label.strip() for its, label in spoken if its == role), role


def test_keys_reach_everything(plain: str, chromium: Browser) -> None:
    chromium.open(plain, 1280)
    reached = []
    for _ in range(20):
        for kind in ("keyDown", "keyUp"):
            chromium.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        if chromium.run("document.activeElement == document.body"):
            break  # behind the last one
        reached.append(chromium.run("document.activeElement.textContent.slice(0, 20)"))
        assert chromium.run("getComputedStyle(document.activeElement).outlineStyle") != "none", reached
    assert reached[:2] == ["To the content", "All tags"]
    assert {"step_400", "step_100", "Compare"} <= set(reached)


def test_text_can_be_read_in_light_and_dark(plain: str, chromium: Browser) -> None:
    for dark in (False, True):
        chromium.open(plain + build_url_query(demo.PAGES["tag"]), 1280, dark=dark)
        for selector in ("body", "a", "small", "thead th"):
            ratio = chromium.run(CONTRAST % selector)
            assert ratio >= 4.5, (dark, selector, ratio)


CONTRAST = """(() => {
  const probe = document.createElement("canvas").getContext("2d");
  const light = color => {
    probe.fillStyle = color; probe.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  document.body.style.setProperty("background-color", "Canvas");
  const one = light(getComputedStyle(document.querySelector("%s")).color);
  const two = light(getComputedStyle(document.body).backgroundColor);
  return (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
})()"""
"""The contrast of an element with the page, as WCAG reckons it."""


def test_forms_lead_to_pages(plain: str, chromium: Browser) -> None:
    chromium.open(plain, 390)
    chromium.events.clear()
    chromium.run("document.querySelector('button').click()")
    chromium.wait("document.readyState == 'complete' && document.querySelector('h1').textContent.startsWith('From')")
    assert chromium.run("document.querySelector('h1').textContent") == "From step_300 to step_400"
    assert chromium.problems() == []


def test_hostile_names_do_nothing(hostile: Path, chromium: Browser) -> None:  # noqa: F811
    tag = xla_ckpt.list_tags(hostile)[1]
    for address in served(hostile):
        for page in ({}, {"page": "tag", "tag": tag}, {"page": "save", "tag": tag}, *({"page": n} for n in HOSTILE)):
            chromium.open(address + build_url_query(page), 1280)
            assert chromium.problems() == []
            assert {request.split("?")[0] for request in chromium.requests()} == {address}
            assert chromium.run("document.scripts.length + document.querySelectorAll('iframe, img').length") == 0


def test_one_document_opens_from_a_disk(tmp_path: Path, chromium: Browser) -> None:
    demo.make(tmp_path / "root")
    file = tmp_path / "run.html"
    viewed = CheckpointSite(str(tmp_path / "root"))
    file.write_bytes(viewed.render_single_document({"leaf": "model/norm", "mesh": "tp=4", "a": "step_300"}))
    for width in WIDTHS:
        chromium.open(file.as_uri(), width)
        assert chromium.problems() == []
        assert chromium.requests() == [file.as_uri()]
        assert chromium.run("document.documentElement.scrollWidth <= window.innerWidth")
