"""The drawings of the documents, as SVG: `python docs/site/drawings.py` writes them, `--check` compares.

Each has a background of its own and follows the reader's colour scheme, so that it can be read in light and in dark
mode.
"""

from __future__ import annotations

import sys
from pathlib import Path

from drawings_of_saves import products, retention, sharing
from shapes import cut_off, drawing, line, rect, text
from written import write_or_check

FOLDER = Path(__file__).parents[1] / "drawings"


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
        text(740, 157, "one rename: the tag is there", "soft", "end"),
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


FOLDERS = (
    (
        "calls",
        "d",
        (
            ("neuron_compat", "drop-in names of NxD and SMP"),
            ("integrations", "trainers"),
            ("cli", "the command xla-ckpt, and its pages"),
            ("dcp", "torch.distributed.checkpoint's calls"),
            ("inspection", "list, show, verify, repair"),
        ),
    ),
    (
        "breadth",
        "b",
        (
            ("formats", "layouts on disk: ours and others'"),
            ("conversion", "convert, export, compare, explain"),
            ("features", "parity, reuse, uploads, products"),
            ("rendering", "text, tables and HTML"),
        ),
    ),
    (
        "core",
        "a",
        (
            ("saving", "capture, write, merge, commit"),
            ("loading", "open, plan, verify, restore"),
            ("snapshot", "the bytes of a state in host memory"),
            ("state", "a program's objects as a tree"),
            ("arrays", "one adapter for each kind of array"),
            ("distributed", "messages and agreement of ranks"),
            ("storage", "file systems, object stores, threads"),
            ("tags", "commit, lease, retention, cleanup"),
        ),
    ),
    (
        "pure core",
        "c",
        (
            ("core/tree", "state trees and leaf paths"),
            ("core/sharding", "boxes, meshes and shardings"),
            ("core/manifest", "the index of a checkpoint"),
            ("core/plan", "plans of saves and restores"),
            ("core/files", "how payload files are laid out"),
        ),
    ),
)
"""Groups of folders from above to below: its name, its colour, and each folder with what it is for."""


def architecture() -> str:
    """The folders of the library in four groups."""
    parts = [text(20, 28, "The folders of the library, from calls to the pure core", "text bold")]
    y = 46
    for group, kind, folders in FOLDERS:
        parts.append(text(20, y + 16, group, "text bold"))
        for folder, meaning in folders:
            parts += [rect(110, y, 126, 22, kind, folder, "text code"), text(248, y + 15.5, meaning, "soft")]
            y += 26
        y += 12
    parts.append(text(20, y + 6, "The core imports no calls and no breadth. saving and loading use both.", "soft"))
    says = ". ".join(
        f"{group}: " + "; ".join(f"{folder}, {meaning}" for folder, meaning in folders) for group, _, folders in FOLDERS
    )
    return drawing(580, y + 22, "The folders of the library", says, parts)


def parallelism() -> str:
    """Eight ranks, and the parts of an array that each of them holds."""
    parts = [text(20, 28, "Mesh(pp=2, dp=2, tp=2), and one weight of each stage", "text bold")]
    for p in range(2):
        x = 20 + 244 * p
        parts.append(text(x + 116, 56, f"pp {p}: stage {p} of the layers", "text", "middle"))
        for d in range(2):
            parts.append(text(x, 91 + 56 * d, f"dp {d}", "soft"))
            for t in range(2):
                rank, kind = 4 * p + 2 * d + t, "abcd"[2 * p + t]
                parts.append(rect(x + 36 + 98 * t, 66 + 56 * d, 94, 42, kind, f"rank {rank}: tp {t}"))
        for t in range(2):
            kind = "abcd"[2 * p + t]
            parts += [
                line((x + 83 + 98 * t, 168), (x + 83 + 98 * t, 192), end=True),
                rect(x + 36 + 98 * t, 196, 98, 36, kind, f"half {t}"),
            ]
    parts += [
        text(20, 258, "Ranks of one colour hold the same box. It is written once, and they", "soft"),
        text(20, 276, "share the work. A load over any other mesh reads the boxes it needs.", "soft"),
    ]
    says = (
        "Eight ranks: ranks 0 to 3 are stage 0, ranks 4 to 7 stage 1. In each stage two ranks of one tp hold the same"
        " half of each weight, once for each dp. The tag holds each half once."
    )
    return drawing(510, 294, "Eight ranks and two weights", says, parts)


SNAPSHOTS = (
    ("host", ((0, 150, "f", "copy to host"), (150, 290, "c", "step")), "the call waits for the whole copy"),
    ("device", ((0, 50, "f", "clone"), (50, 290, "c", "step")), "the call waits for a copy on the device"),
    ("overlap", ((0, 20, "f", ""), (20, 130, "c", "forward"), (130, 200, "f", "wait"), (200, 290, "c", "step")), ""),
)


def snapshots() -> str:
    """What the program does meanwhile, in each kind of snapshot."""
    parts = [text(20, 28, "What waits for the copy (an accelerator's state)", "text bold")]
    for row, (kind, bars, says) in enumerate(SNAPSHOTS):
        y = 50 + 92 * row
        copied = {"host": 150, "device": 200, "overlap": 200}[kind]
        parts += [text(20, y + 17, kind, "text code"), text(20, y + 47, "background", "soft")]
        parts += [rect(110 + 1.25 * a, y, 1.25 * (b - a), 26, colour, words) for a, b, colour, words in bars]
        if kind != "host":
            start = 20 if kind == "overlap" else 50
            parts.append(rect(110 + 1.25 * start, y + 30, 1.25 * (copied - start), 26, "b", "copy to host"))
        parts.append(rect(110 + 1.25 * copied, y + 30, 1.25 * (290 - copied), 26, "a", "write"))
        parts.append(text(110, y + 74, says or "only the next step waits, for the rest of the copy", "soft"))
    parts.append(line((110, 322), (480, 322), end=True))
    parts.append(text(110, 340, "time (not to scale); red: the program waits", "soft"))
    says = (
        "host: the call copies everything to host memory, then the step runs and files are written. device: the call"
        " clones on the device, and the background copies to the host and writes. overlap: the call returns early, the"
        " forward pass runs beside the copy, and the optimizer step waits for what is left of it."
    )
    return drawing(500, 354, "Three kinds of snapshot", says, parts)


def files() -> str:
    """From an array over its grid in the manifest to the bytes of files."""
    parts = [
        text(20, 28, "From an array to its bytes", "text bold"),
        text(20, 54, "manifest.json", "text code"),
        rect(20, 62, 460, 92, "e"),
        text(32, 84, '"names": ["model/w"], "dtype": "float32", "shape": [4, 6],', "text code"),
        text(32, 104, '"cuts": [[[0, 2, 4], [0, 6]]], "files": [0, 1], "offsets": 512', "text code"),
        text(32, 124, "cuts of rows and columns; file and offset of each cell", "soft"),
        text(32, 144, "files: their names, sizes, and a digest for every block", "soft"),
        text(20, 184, "model/w", "text code"),
        rect(20, 194, 110, 44, "a", "rows 0 to 1"),
        rect(20, 238, 110, 44, "b", "rows 2 to 3"),
    ]
    for number, kind in enumerate("ab"):
        y = 194 + 58 * number
        parts += [
            line((132, 216 + 44 * number), (190, y + 14), end=True),
            rect(194, y, 70, 30, "e", "header"),
            rect(264, y, 96, 30, kind, f"rows {2 * number} to {2 * number + 1}"),
            rect(360, y, 120, 30, "e", "other arrays"),
            text(194, y + 46, f"model/{number}-of-2.safetensors", "text code"),
        ]
    parts.append(text(20, 324, "A reader compares the digest of a block before it hands bytes on.", "soft"))
    says = (
        "The manifest says of the array model/w that it is cut into rows 0 to 1, which lie at byte 512 of file 0; rows"
        " 2 to 3, at byte 512 of file 1. Each file is a header and the regions of its arrays; blocks have digests."
    )
    return drawing(500, 342, "From an array to its bytes", says, parts)


DRAWINGS = {
    "save.svg": save,
    "boxes.svg": boxes,
    "tree.svg": tree,
    "architecture.svg": architecture,
    "parallelism.svg": parallelism,
    "snapshots.svg": snapshots,
    "format.svg": files,
    "sharing.svg": sharing,
    "retention.svg": retention,
    "products.svg": products,
}


def main() -> str | None:
    """Write the drawings, or with `--check` say which is not what this script makes; both refuse words that are cut."""
    texts = {name: made() for name, made in DRAWINGS.items()}
    if cut := [f"{name}: {words}" for name, made in texts.items() for words in cut_off(made)]:
        return "\n".join(["words reach past the edge of a drawing:", *cut])
    return write_or_check({FOLDER / name: made for name, made in texts.items()}, "drawings.py")


if __name__ == "__main__":
    sys.exit(main())
