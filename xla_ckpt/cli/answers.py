"""The answers of commands that change something: what was done."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from xla_ckpt.tables.texts import count, size


def conversion(facts: dict[str, Any]) -> RenderableType:
    """The answer of ``convert``."""
    return Text(
        f"{facts['tag']}: {size(facts['nbytes'])} as {facts['layout']} over {facts['mesh']}, "
        f"{count(facts['files'], 'file')}, in {facts['path']}, in {facts['seconds']:.1f} s"
    )


def exported(facts: dict[str, Any]) -> RenderableType:
    """The answer of ``export``."""
    files = f"{len(facts['files'])} files" if len(facts["files"]) > 1 else facts["files"][0]
    text = f"{facts['tag']}: {count(facts['arrays'], 'array')}, {size(facts['nbytes'])}, as {files} in {facts['path']}"
    if not facts["config"]:
        text += "\nThere is no config.json, which transformers needs: copy the model's, or give it with --config."
    return Text(text)


def done(facts: dict[str, Any]) -> RenderableType:
    """The answer of commands that do something with each of some tags."""
    return Text("\n".join(f"{t['tag']}: {t['done']}" for t in facts["tags"]))


def cleaned(facts: dict[str, Any]) -> RenderableType:
    """The answer of ``clean``."""
    lines = [f"{name}: removed" for name in facts["removed"]]
    lines += [f"{its['name']}: stays ({its['why']})" for its in facts["kept"]]
    return Text("\n".join(lines) or "nothing to remove")
