"""What a loss of power may leave of an operation: directories made from the calls that were recorded.

The rules are POSIX's, and harsher than those of any journal: what was written is there for certain only after an fsync
of that file, and a name only after an fsync of the directory that it is in. Everything else may be there or not, each
by itself, in any order. (ext4 and XFS keep names in order, and sync more than they were asked for.)
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.injection import is_of
from tests.crash.operations import Lost, Operation
from tests.crash.recorder import Record


@dataclass(eq=False)
class Node:
    """A file, or a directory, whatever it is called."""

    is_directory: bool
    data: bytes = b""
    """What a file held before the operation."""

    names: dict[str, Node] = field(default_factory=dict)
    """What is in a directory; as it was before, or as the replay has got so far."""


@dataclass(frozen=True, eq=False)
class Effect:
    """What a call has done to one file or directory, or would have."""

    call: int
    """Index of the record."""

    node: Node
    name: str = ""
    """In a directory: the name that changes."""

    to: Node | None = None
    """In a directory: what has the name from now on; None: nothing."""

    offset: int = 0
    data: bytes | None = None
    """In a file: what is written at `offset`."""

    size: int | None = None
    """In a file: its new size."""


@dataclass(frozen=True)
class Replay:
    """The effects of all calls, and when each became durable."""

    before: Node
    effects: tuple[Effect, ...]
    durable: tuple[int, ...]
    """Index of the record that made each effect durable; the number of records where none did."""

    records: tuple[Record, ...]
    told: int
    """Index of the record at which the caller was told of the outcome."""

    there: dict[Node, str]
    """What there was at that time, and its path."""

    def open_at(self, point: int) -> list[Effect]:
        """The effects of the first `point` calls that are not durable then."""
        return [e for e, at in zip(self.effects, self.durable, strict=True) if e.call < point <= at]

    def states(self, point: int) -> Iterator[tuple[str, dict[str, bytes | None]]]:
        """What a loss of power after `point` calls may leave, and of which kind that is: path -> bytes, None: a
        directory.
        """
        done = [e for e in self.effects if e.call < point]
        unsure = self.open_at(point)
        calls = sorted({e.call for e in unsure})
        synced = [e for e in done if e not in unsure]
        yield "all that was not synced is lost", tree_of(self.before, synced)
        yield "names are there, and bytes are not", tree_of(self.before, [e for e in done if e in synced or e.name])
        yield "bytes are there, and names are not", tree_of(self.before, [e for e in done if e in synced or not e.name])
        for call in calls:
            name = f"{call} {self.records[call].call} {self.records[call].path}"
            yield f"lost is {name}", tree_of(self.before, [e for e in done if e.call != call or e in synced])
            yield (
                f"of what was not synced there is {name}",
                tree_of(self.before, [e for e in done if e in synced or e.call == call]),
            )
        for effect in unsure:  # one half of a rename from one directory to another
            if any(e.call == effect.call and e.node is not effect.node for e in unsure):
                yield f"half of {effect.call} is lost", tree_of(self.before, [e for e in done if e is not effect])


def replay(start: Path, root: Path, records: Sequence[Record]) -> Replay:
    """The effects of recorded calls on a directory that was a copy of `start` at the beginning."""
    before = _read(start)
    bases: dict[Node, Node] = {}
    now = _copy(before, bases)

    def base(node: Node) -> Node:
        """The node of the tree before, for one of the tree that the replay changes; a new one has been empty."""
        return bases.setdefault(node, Node(node.is_directory))

    effects: list[Effect] = []
    durable: dict[int, int] = {}

    def name(index: int, place: tuple[Node, str], to: Node | None) -> None:
        directory, text = place
        if to is None:
            del directory.names[text]
        else:
            directory.names[text] = to
        effects.append(Effect(index, base(directory), name=text, to=None if to is None else base(to)))

    def place_of(path: str) -> tuple[Node, str]:
        *parents, last = Path(path).relative_to(root).parts
        node = now
        for part in parents:
            node = node.names[part]
        return node, last

    def node_of(path: str) -> Node | None:
        if path.endswith(" (deleted)"):
            return None
        if path == str(root):
            return now
        directory, last = place_of(path)
        return directory.names[last]

    told, there = len(records), {}
    for index, record in enumerate(records):
        if record.number < 0 and record.path == "told":
            told, there = index, {base(node): path for node, path in _places(now, "")}
        if record.number < 0 or record.result < 0:
            continue
        match record.call:
            case "create" | "truncate-open":
                directory, last = place = place_of(record.path)
                if last not in directory.names:
                    name(index, place, Node(is_directory=False))
                elif record.call == "truncate-open":
                    effects.append(Effect(index, base(directory.names[last]), size=0))
            case "mkdir":
                name(index, place_of(record.path), Node(is_directory=True))
            case "unlink" | "rmdir":
                name(index, place_of(record.path), None)
            case "rename":
                moved = node_of(record.path)
                name(index, place_of(record.path), None)
                name(index, place_of(record.other), moved)
            case "link":
                name(index, place_of(record.other), node_of(record.path))
            case "exchange":
                one, other = node_of(record.path), node_of(record.other)
                name(index, place_of(record.path), other)
                name(index, place_of(record.other), one)
            case "write":
                if (node := node_of(record.path)) is not None:
                    effects.append(Effect(index, base(node), offset=record.offset, data=record.data))
            case "fallocate":
                if (node := node_of(record.path)) is not None:
                    effects.append(Effect(index, base(node), offset=record.offset + record.size, data=b""))
            case "ftruncate":
                if (node := node_of(record.path)) is not None:
                    effects.append(Effect(index, base(node), size=record.size))
            case "fsync":
                node = node_of(record.path)
                for number, effect in enumerate(effects):
                    if node is not None and effect.node is base(node):
                        durable.setdefault(number, index)
            case unknown:
                raise NotImplementedError(f"a loss of power at {unknown}")
    whole = len(records) + 1
    since = tuple(durable.get(n, whole) for n in range(len(effects)))
    return Replay(before, tuple(effects), since, tuple(records), told, there)


def _places(node: Node, path: str) -> Iterator[tuple[Node, str]]:
    yield node, path
    for name, child in node.names.items():
        yield from _places(child, f"{path}/{name}" if path else name)


def tree_of(before: Node, effects: Sequence[Effect]) -> dict[str, bytes | None]:
    """The directory in which some effects have happened, and no others."""
    names: dict[int, dict[str, Node]] = {}
    data: dict[int, bytearray] = {}
    for effect in effects:
        key = id(effect.node)
        if effect.node.is_directory:
            held = names.setdefault(key, dict(effect.node.names))
            if effect.to is None:
                held.pop(effect.name, None)
            else:
                held[effect.name] = effect.to
            continue
        content = data.setdefault(key, bytearray(effect.node.data))
        end = effect.offset + len(effect.data) if effect.data is not None else effect.size or 0
        content.extend(bytes(max(0, end - len(content))))
        if effect.data is not None:
            content[effect.offset : end] = effect.data
        elif effect.size is not None:
            del content[end:]
    tree: dict[str, bytes | None] = {}

    def walk(node: Node, at: str) -> None:
        for name, child in names.get(id(node), node.names).items():
            if child.is_directory:
                tree[at + name] = None
                walk(child, f"{at}{name}/")
            else:
                tree[at + name] = bytes(data.get(id(child), child.data))

    walk(before, "")
    return tree


def write_tree(tree: dict[str, bytes | None], root: Path) -> None:
    """Make such a directory."""
    root.mkdir(parents=True)
    for path, data in tree.items():
        if data is None:
            (root / path).mkdir(parents=True, exist_ok=True)
        else:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)


@dataclass(frozen=True)
class Loss:
    """What was looked at after losses of power in one operation."""

    points: int
    """Calls after each of which the power was lost."""

    states: int
    """Different directories that this may leave."""

    problems: tuple[str, ...]
    late: tuple[str, ...]
    """What of the new checkpoint was not durable when the caller was told of it."""


def lose_power(
    operation: Operation, start: Path, root: Path, records: Sequence[Record], folder: Path, share: float = 1.0
) -> Loss:
    """Lose power after each call of an operation that has succeeded, or after a share of them, and look at what that
    may leave.
    """
    played = replay(start, root, records)
    points: Sequence[int] = range(len(records) + 1)
    if share < 1:
        points = sorted(random.Random(operation.name).sample(points, max(1, round(share * len(points)))))
    told, seen, problems = played.told, 0, []
    known: set[tuple[str, bool]] = set()
    for point in points:
        done = point > told
        for why, tree in played.states(point):
            if (key := (key_of(tree), done)) in known:
                continue
            known.add(key)
            place = folder / f"state.{seen}"
            seen += 1
            write_tree(tree, place)
            problem = problem_in(operation, place, done=done)
            if problem is not None:
                problems.append(f"power lost after {point} calls, {why}: {problem}")
            shutil.rmtree(place)
    made = [e for e in played.open_at(told) if e.node in played.there and (e.to is not None or not e.name)]
    late = {f"{played.there[e.node]}/{e.name}".strip("/") for e in made} & set(played.there.values())
    return Loss(len(points), seen, tuple(problems), tuple(sorted(late)))


def problem_in(operation: Operation, root: Path, *, done: bool) -> str | None:
    """What is wrong in a directory after a loss of power, before or after the caller was told of the outcome."""
    try:
        state = is_of(operation, found := operation.read(root))
    except Lost as lost:
        return str(lost)
    if state is None:
        return f"found {found}, which is neither {operation.before} nor {operation.after}"
    return f"the caller was told of it, and found is {found}" if done and not state else None


def key_of(tree: dict[str, bytes | None]) -> str:
    """Two directories with one key hold the same."""
    return hashlib.sha256(repr(sorted(tree.items())).encode()).hexdigest()


def _read(path: Path) -> Node:
    if path.is_dir():
        return Node(True, names={child.name: _read(child) for child in sorted(path.iterdir())})
    return Node(False, data=path.read_bytes())


def _copy(node: Node, bases: dict[Node, Node]) -> Node:
    made = Node(node.is_directory, node.data, {name: _copy(child, bases) for name, child in node.names.items()})
    bases[made] = node
    return made
