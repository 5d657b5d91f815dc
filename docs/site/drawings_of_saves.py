"""What saves share, keep and are followed by, drawn for `drawings.py`."""

from __future__ import annotations

from shapes import drawing, line, rect, text


def sharing() -> str:
    """Three saves of a run of which little is trained, and the files that they have in common."""
    parts = [text(20, 28, "Three saves with share=True: one file of what is not trained", "text bold")]
    for number in range(3):
        x, tag = 20 + 172 * number, f"step_{10 * (number + 1)}"
        parts += [
            rect(x, 48, 156, 124, "e"),
            text(x + 12, 68, f"{tag}/", "text code"),
            rect(x + 12, 80, 132, 30, "abc"[number], f"trained, {10 * (number + 1)}"),
            rect(x + 12, 120, 132, 40, "d", "not trained" if number == 0 else "the same file"),
            line((x + 78, 162), (x + 78, 200)),
        ]
    parts += [
        line((98, 200), (270, 200)),
        line((442, 200), (270, 200)),
        line((270, 200), (270, 222), end=True),
        rect(190, 226, 160, 36, "d", "bytes, on disk once"),
        text(20, 288, "A file has a name in each tag, and its bytes go with the last of them:", "soft"),
        text(20, 306, "each tag is whole by itself, whichever others are deleted.", "soft"),
    ]
    says = (
        "The tags step_10, step_20 and step_30 each have a file of what is trained, which is another one in each of"
        " them, and one of what is not trained, which all three have in common: one file of the disk with three names."
    )
    return drawing(540, 324, "Three tags that share a file", says, parts)


KEPT = (
    ("900", "0.5", ""),
    ("1000", "0.9", "every 1000 steps"),
    ("1100", "0.3", "best loss"),
    ("1200", "0.4", "best loss"),
    ("1300", "0.6", "newest"),
)


def retention() -> str:
    """Which tags three policies together keep."""
    parts = [
        text(20, 28, 'LatestN(1) | BestN("loss", 2) | EveryNSteps(1000)', "text code"),
        text(20, 92, "loss", "soft"),
    ]
    for number, (step, loss, why) in enumerate(KEPT):
        x = 62 + 132 * number
        parts += [
            rect(x, 48, 116, 26, "c" if why else "f", f"step_{step}", "text code"),
            text(x + 58, 92, loss, "text", "middle"),
            text(x + 58, 116, why or "deleted", "text" if why else "soft", "middle"),
        ]
    parts += [
        line((62, 132), (716, 132), end=True),
        text(62, 150, "commits; a tag stays that one of the policies keeps", "soft"),
    ]
    says = "; ".join(
        f"step_{step} with loss {loss} is {f'kept: {why}' if why else 'deleted'}" for step, loss, why in KEPT
    )
    return drawing(740, 168, "What three policies keep of five tags", f"{says}.", parts)


def products() -> str:
    """What follows the commit of a tag."""
    parts = [text(20, 28, "Products are made of committed tags, in the background", "text bold")]
    for row, words in enumerate(("training", "save", "products")):
        parts.append(text(20, 69 + 40 * row, words, "soft"))
    for number, step in enumerate((500, 1000)):
        x = 110 + 230 * number
        parts += [
            rect(x, 52, 222, 26, "c", f"after step {step}"),
            rect(x, 92, 70, 26, "a", "write"),
            rect(x + 70, 92, 60, 26, "b", "commit"),
            line((x + 130, 105), (x + 138, 105), (x + 138, 130), end=True),
        ]
    parts += [
        rect(240, 132, 60, 26, "d", "dcp"),
        rect(470, 132, 60, 26, "d", "hf"),
        rect(534, 132, 60, 26, "d", "dcp"),
        text(240, 180, "runs/lm_dcp/step_500", "text code"),
        text(470, 180, "hf/step_1000", "text code"),
        text(470, 198, "runs/lm_dcp/step_1000", "text code"),
        line((110, 214), (680, 214), end=True),
        text(110, 232, "time (not to scale); no save waits for a product", "soft"),
    ]
    says = (
        "Training goes on after steps 500 and 1000 while tags are written and committed. After the first commit a"
        " product in the layout dcp is made of the tag, after the second one a directory of Hugging Face's, which is"
        " asked for every 1000 steps, and one in the layout dcp. No save waits for that."
    )
    return drawing(700, 248, "Products after commits", says, parts)
