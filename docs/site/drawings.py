"""The four drawings of the documents, as SVG: `python docs/site/drawings.py` writes them, `--check` compares.

Each has a background of its own and follows the reader's colour scheme, so that it can be read in light and in dark
mode.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "drawings"
STYLE = """
svg{font-family:system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;font-size:13px}
.back{fill:#fbfbfd;stroke:#c9ccd6}.text{fill:#20232b}.soft{fill:#555b69}
.code{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:12px}
.line{stroke:#555b69;fill:none;stroke-width:1.3}.a{fill:#bcd3f7}.b{fill:#f7d9b0}.c{fill:#c4e6c3}.d{fill:#e3c8ef}.e{fill:#e6e8ee}.f{fill:#f4b9b5}
.box{stroke:#555b69;stroke-width:1}.bold{font-weight:600}
@media (prefers-color-scheme:dark){
.back{fill:#20232b;stroke:#454a57}.text{fill:#eceef3}.soft{fill:#aab0bf}.line{stroke:#aab0bf}.box{stroke:#aab0bf}
.a{fill:#2f5590}.b{fill:#80561c}.c{fill:#2f6b3a}.d{fill:#63407a}.e{fill:#3a3f4c}.f{fill:#8b3733}}
"""


def text(x: float, y: float, words: str, kind: str = "text", anchor: str = "start") -> str:
    """A line of text whose baseline begins, or has its middle or end, at a place."""
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, words: str = "", more: str = "text") -> str:
    """A box, with words in its middle."""
    box = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" class="box {kind}"/>'
    return box + (text(x + width / 2, y + height / 2 + 4.5, words, more, "middle") if words else "")


def line(*points: tuple[float, float], end: bool = False) -> str:
    """A line through points, with a head at its end if it is an arrow."""
    path = "M" + "L".join(f"{x} {y}" for x, y in points)
    return f'<path d="{path}" class="line"{" marker-end=" + chr(34) + "url(#head)" + chr(34) if end else ""}/>'


def drawing(width: int, height: int, title: str, says: str, parts: Iterable[str]) -> str:
    """A whole file.

    Args:
        width: In pixels, as `height`.
        height: See `width`.
        title: What it shows, for programs that read a page aloud; `says` is the same at length.
        says: See `title`.
        parts: What is drawn.
    """
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" class="soft"/></marker></defs>'
    )
    back = f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" class="back"/>'
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    told = f'<title id="title">{escape(title)}</title><desc id="says">{escape(says)}</desc>'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title says">'
    return "\n".join([start, told, f"<style>{STYLE}</style>{head}{back}", *parts, "</svg>\n"])


def save() -> str:
    """An asynchronous save of two ranks on a time line."""
    parts = [text(20, 28, "An asynchronous save of two ranks", "text bold"), line((496, 120), (496, 236))]
    for row, rank in enumerate((0, 1)):
        y = 52 + row * 112
        parts += [
            text(20, y + 17, f"rank {rank}", "text bold"),
            text(20, y + 36, "training", "soft"),
            rect(110, y + 18, 120, 26, "c", "step 10"),
            rect(230, y + 18, 26, 26, "f"),
            *(rect(256 + 120 * i, y + 18, 120, 26, "c", f"step {11 + i}") for i in range(4)),
            text(20, y + 74, "background", "soft"),
            rect(256, y + 56, 150, 26, "a", "write, digest"),
            rect(406, y + 56, 60, 26, "b", "fsync"),
            rect(466, y + 56, 60, 26, "d", "meet"),
        ]
    parts += [
        rect(526, 108, 70, 26, "b", "commit"),
        rect(596, 108, 70, 26, "e", "retain"),
        line((243, 262), (243, 212), end=True),
        text(20, 280, "the stall: describe, plan, snapshot. The caller waits for this alone.", "soft"),
        line((596, 134), (596, 144)),
        text(602, 157, "one rename: the tag is there", "soft"),
        line((110, 304), (736, 304), end=True),
        text(110, 322, "time (not to scale)", "soft"),
    ]
    says = (
        "After step 10 each rank stalls for a short time, in which the state is described, planned and frozen. Training"
        " goes on with steps 11 to 14, while the rank writes and digests its files in the background and syncs them."
        " The ranks meet, rank 0 commits the tag by one rename, and old tags are deleted."
    )
    return drawing(760, 340, "An asynchronous save on a time line", says, parts)


def boxes() -> str:
    """One array over two meshes."""
    parts = [text(20, 28, "One array of 8 rows, saved over one mesh and loaded over another", "text bold")]
    kinds = "abcd"
    parts.append(text(95, 56, "saved, tp=4", "text", "middle"))
    parts += [rect(20, 68 + 40 * i, 150, 40, kinds[i], f"rank {i}: rows {2 * i} to {2 * i + 1}") for i in range(4)]
    parts.append(text(350, 56, "in the tag: boxes and bytes", "text", "middle"))
    for i in range(4):
        parts.append(rect(270, 68 + 40 * i, 160, 40, kinds[i], f"rows {2 * i} to {2 * i + 1}"))
        parts.append(line((172, 88 + 40 * i), (266, 88 + 40 * i), end=True))
    parts.append(text(650, 56, "loaded, dp=2, tp=2", "text", "middle"))
    for d in range(2):
        for t in range(2):
            x, y = 550 + 104 * d, 68 + 86 * t
            parts += [
                rect(x, y, 96, 37, kinds[2 * t]),
                rect(x, y + 37, 96, 37, kinds[2 * t + 1]),
                text(x + 48, y + 33, f"rank {2 * d + t}:", "text bold", "middle"),
                text(x + 48, y + 52, f"rows {4 * t} to {4 * t + 3}", "text", "middle"),
            ]
    for t in range(2):
        parts.append(line((432, 108 + 80 * t), (546, 108 + 84 * t), end=True))
    parts += [
        text(598, 248, "dp 0", "soft", "middle"),
        text(702, 248, "dp 1", "soft", "middle"),
        text(
            20,
            276,
            "A tag describes the global array. Each rank of the new job reads the boxes that make up its part.",
            "soft",
        ),
    ]
    says = (
        "An array of 8 rows is saved by four ranks, tp=4, of which each holds two rows. The tag holds four boxes. A job"
        " over dp=2 and tp=2 loads it: ranks 0 and 2 read rows 0 to 3, ranks 1 and 3 read rows 4 to 7."
    )
    return drawing(800, 296, "One array over two meshes", says, parts)


TREE = (
    (0, "runs/lm/", "the root directory: what a program gives as path"),
    (1, "best/", "a pinned tag: retention leaves it"),
    (1, "step_10/", "a tag: complete, because it has this name"),
    (2, "manifest.json", "which bytes of which file are which box; digests"),
    (2, "model/", "one payload of each rank: safetensors"),
    (2, "optimizer/", "the same for the state of the optimizer"),
    (2, "_CHECKPOINT_METADATA", "orbax's own, as is commit_success.txt"),
    (1, "step_20/", "committed last, the newest: what a load without a name takes"),
)


def tree() -> str:
    """What lies in a root directory."""
    parts = [text(20, 28, "A root directory and its tags", "text bold")]
    for row, (depth, name, says) in enumerate(TREE):
        y = 58 + 26 * row
        x = 30 + 26 * depth
        if depth:
            parts.append(line((x - 14, y - 20), (x - 14, y - 5), (x - 4, y - 5)))
        parts.append(text(x, y, name, "text code"))
        parts.append(text(300, y, says, "soft"))
    says = "; ".join(f"{name} {meaning}" for _, name, meaning in TREE)
    return drawing(760, 58 + 26 * len(TREE), "A root directory and its tags", says, parts)


NEEDS = (
    ("a training run: model, optimizer, ...", "save_checkpoint", "load_checkpoint"),
    ("any tree of arrays and values", "save", "restore"),
    ("a part, or an array elsewhere", "", "restore(like=...)"),
    ("other ranks, other topology", "", "load_checkpoint (the same call)"),
    ("what is there, and is it good?", "", "list_tags, verify, explain"),
    ("another library's files", "convert(to=...)", "load_checkpoint, convert"),
    ("Hugging Face", "export_hf", "load_checkpoint, restore"),
)


def calls() -> str:
    """Which call is for which need."""
    parts = [
        text(20, 28, "Which call for which need", "text bold"),
        text(20, 56, "You have, or want", "soft"),
        text(300, 56, "to write", "soft"),
        text(500, 56, "to read", "soft"),
    ]
    for row, (need, write, read) in enumerate(NEEDS):
        y = 68 + 38 * row
        parts.append(rect(20, y, 260, 30, "e", need))
        if write:
            parts.append(rect(300, y, 180, 30, "b", write, "text code"))
        parts.append(rect(500, y, 250, 30, "a", read, "text code"))
    says = "; ".join(f"{need}: {' and '.join(call for call in (write, read) if call)}" for need, write, read in NEEDS)
    return drawing(770, 76 + 38 * len(NEEDS), "Which call for which need", says, parts)


DRAWINGS = {"save.svg": save, "boxes.svg": boxes, "tree.svg": tree, "calls.svg": calls}


def main() -> str | None:
    """Write the drawings, or with `--check` say which is not what this script makes."""
    if "--check" in sys.argv[1:]:
        old = [n for n, made in DRAWINGS.items() if not (FOLDER / n).exists() or (FOLDER / n).read_text() != made()]
        return f"not up to date: {', '.join(old)}; run python docs/site/drawings.py" if old else None
    FOLDER.mkdir(exist_ok=True)
    for name, made in DRAWINGS.items():
        (FOLDER / name).write_text(made())
    return None


if __name__ == "__main__":
    sys.exit(main())
