"""torch.save of a value, and other single files, that appear whole, durable, and in the place of an older one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from xla_ckpt.errors import UnsupportedStateError, storage_errors
from xla_ckpt.storage.base import Sink, Source
from xla_ckpt.storage.door import above
from xla_ckpt.tags.root import Kind
from xla_ckpt.tags.roots import root_of
from xla_ckpt.tags.transaction import Transaction
from xla_ckpt.tree.nested import leaves, replaced_leaves


def write_whole_file(
    value: Any, path: str, *, sealed: Callable[[Source], object] = lambda file: None, **options: Any
) -> None:
    """torch.save of a value. XLA tensors are stored as CPU tensors, and brought there in one batch.

    The file has CRC-32s, whatever the program has told torch. Missing directories are made.

    Args:
        sealed: Gets the file when it is durable, before it takes its name.
        options: For torch.save.

    Raises:
        UnsupportedStateError: Something in it cannot be pickled. What was there is there still.
        StorageError: The storage refused. Likewise.
        NotDurableError: The file is in place, and a loss of power may take it away.
    """
    hosted = on_host(value)
    store, name = above(path)
    with (
        storage_errors("saving", file=path),
        Transaction(root_of(store), name, Kind.RENEWED_FILE) as transaction,
    ):
        sink = transaction.directory.create(name, 0)
        try:
            _save(hosted, sink, path, options)
            sink.commit()
        except BaseException:
            sink.abandon()
            raise
        transaction.seal({})
        with closing(transaction.directory.open(name)) as file:
            sealed(file)
        transaction.commit()


def renew_file(data: bytes, path: str) -> None:
    """Write a small file of these bytes. Missing directories are made.

    Raises:
        StorageError: The storage refused. What was there is there still.
        NotDurableError: The file is in place, and a loss of power may take it away.
    """
    store, name = above(path)
    with (
        storage_errors("saving", file=path),
        Transaction(root_of(store), name, Kind.RENEWED_FILE) as transaction,
    ):
        transaction.seal({name: data})
        transaction.commit()


def xla_tensors(tree: Any) -> list[torch.Tensor]:
    """The XLA tensors in containers, each once, in the order in which they are met."""
    met = {id(leaf): leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"}
    return list(met.values())


def changed_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same containers, named tuples included, with `change` of each tensor in them."""
    return replaced_leaves(tree, lambda _, leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, classes=True)


def on_host(tree: Any) -> Any:
    """The same containers with all XLA tensors on the CPU, brought there in one batch. Without any, the tree itself."""
    tensors = xla_tensors(tree)
    if not tensors:
        return tree
    from xla_ckpt.arrays.xla import to_host

    hosted = {id(t): h for t, h in zip(tensors, to_host(tensors), strict=True)}
    return changed_tensors(tree, lambda tensor: hosted.get(id(tensor), tensor))


class _Stream:
    """What torch.save writes to: a file from its beginning to its end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._end = 0
        self.refused: OSError | None = None
        """What the storage said. torch raises an error of its own in its place."""

    def write(self, data: Any) -> int:
        """Append bytes; how many."""
        view = memoryview(data).cast("B")
        try:
            self._sink.patch(view, self._end)
        except OSError as error:
            self.refused = error
            raise
        self._end += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is kept back."""


def _save(value: Any, sink: Sink, path: str, options: dict[str, Any]) -> None:
    stream = _Stream(sink)
    try:
        with _crc32s():
            torch.save(value, stream, **options)  # type: ignore[arg-type]  # torch asks for `write` alone
    except Exception as error:  # objects raise whatever they like while they are pickled
        if stream.refused is not None:
            raise stream.refused from error
        raise UnsupportedStateError(f"something in it cannot be pickled: {error}", file=path) from error


@contextmanager
def _crc32s() -> Iterator[None]:
    """Have torch.save write CRC-32s: without them nobody finds a damaged byte."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
