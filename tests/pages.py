"""What a browser makes of HTML, as far as tests ask: elements, texts, and whether anything in it could run."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"br", "hr", "input", "meta", "link", "img"}
"""Elements without an end."""

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"'><svg/onload=alert(1)>",
    "</style></title></textarea></table><iframe src=//evil>",
    "javascript:alert(1)",
    "&lt;b&gt; &#60;i&#62;",
    "right\u202eto\u2066left",
    "new\nline\r\ttab",
    "nul\x00 escape\x1b[31m bell\x07",
    "x" * 3000,
    "[red]not rich[/red]",
    "%22%3E#?&=+;",
]
"""Names that break pages which put them in as they are."""


class Parsed(HTMLParser):
    """HTML as elements in their order, with their attributes; every element has to be closed in its place."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, (tag, self._open)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        """All texts."""
        return " ".join(self.texts)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]

    def check_harmless(self) -> None:
        """Check that nothing in it runs, is fetched, or hides what stands there."""
        for tag, attributes in self.elements:
            assert tag not in {"script", "iframe", "object", "embed", "link", "base", "img"}, tag
            for name, value in attributes.items():
                assert not name.startswith("on"), (tag, name)
                if name in {"href", "src", "action"}:
                    assert value is not None
                    assert value == "" or value[0] in "?#./", (tag, name, value)
        shown = self.text
        assert not [c for c in shown if c in "\x00\x1b\x07\r\u202e\u2066"]
