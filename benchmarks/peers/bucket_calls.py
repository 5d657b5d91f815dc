"""Each contender's save into an object store, and its load from there, as its users call it.

A contender is made in the measuring process before the clock starts, and imports what it needs. What is saved are CPU
tensors by name. A save goes to a tag below an address. `begin` returns a function that saves, or waits for a save that
has begun, as the saves of `saves` do. A load brings tensors in memory of its own, of some of the names.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.peers.installed import PEERS

Values = dict[str, Any]
Shapes = Mapping[str, Sequence[int]]
REGION = "us-east-1"
AT_ONCE = 16
"""Files that the bare clients have on their way."""
Item, Answer = TypeVar("Item"), TypeVar("Answer")


class Contender:
    """What all of them have."""

    def save(self, values: Values, address: str, tag: str) -> None:
        raise NotImplementedError

    def begin(self, values: Values, address: str, tag: str) -> Callable[[], object]:
        return partial(self.save, values, address, tag)

    def load(self, wanted: Shapes, address: str, tag: str) -> Values:
        raise NotImplementedError


class Ours(Contender):
    def __init__(self) -> None:
        import obstore  # noqa: F401  # loaded before the clock starts, as those of the others

        import xla_ckpt

        self._save, self._restore, self._spec = xla_ckpt.save, xla_ckpt.restore, xla_ckpt.ArraySpec
        self._options = xla_ckpt.SaveOptions(stale="ignore")  # the loop trains nothing

    def save(self, values: Values, address: str, tag: str) -> None:
        self._save(address, tag, values)

    def begin(self, values: Values, address: str, tag: str) -> Callable[[], object]:
        return self._save(address, tag, values, async_save=True, options=self._options).result

    def load(self, wanted: Shapes, address: str, tag: str) -> Values:
        like = {name: self._spec(tuple(shape), "float32") for name, shape in wanted.items()}
        tree: Values = self._restore(address, tag, like=like).tree
        return tree


class Bare(Contender):
    """The client that we use, alone: a file for each tensor."""

    def __init__(self) -> None:
        import obstore

        self._options: Any = {"endpoint": os.environ["AWS_ENDPOINT_URL"], "client_options": {"allow_http": True}}
        self._store: Any = obstore.store.S3Store

    def save(self, values: Values, address: str, tag: str) -> None:
        bucket, key = _parts(address, tag)
        store = self._store(bucket, **self._options)
        _side_by_side(lambda name: store.put(f"{key}/{name}", values[name].view(-1).numpy().view("u1").data), values)

    def load(self, wanted: Shapes, address: str, tag: str) -> Values:
        bucket, key = _parts(address, tag)
        store = self._store(bucket, **self._options)
        # The client's memory cannot be written to, so that nobody could train what lies in it.
        return _side_by_side(
            lambda name: _tensor(store.get(f"{key}/{name}").bytes(), wanted[name], copied=True), wanted
        )


class Boto(Contender):
    """boto3, with a file for each tensor."""

    def __init__(self) -> None:
        import boto3
        from botocore.config import Config

        config = Config(max_pool_connections=10 * AT_ONCE)  # each file that is on its way has up to ten
        self._client: Any = boto3.client("s3", region_name=REGION, config=config)

    def save(self, values: Values, address: str, tag: str) -> None:
        bucket, key = _parts(address, tag)

        def put(name: str) -> None:
            file = io.BytesIO(values[name].view(-1).numpy().view("u1").data)
            self._client.upload_fileobj(file, bucket, f"{key}/{name}")

        _side_by_side(put, values)

    def load(self, wanted: Shapes, address: str, tag: str) -> Values:
        bucket, key = _parts(address, tag)

        def get(name: str) -> Any:
            file = io.BytesIO()
            self._client.download_fileobj(bucket, f"{key}/{name}", file)
            return _tensor(file.getbuffer(), wanted[name])

        return _side_by_side(get, wanted)


class Dcp(Contender):
    """Stock torch.distributed.checkpoint with a writer and a reader of somebody else's."""

    def __init__(self) -> None:
        import torch.distributed.checkpoint as stock

        self._stock = stock
        sys.path.append(str(PEERS))

    def _writer(self, place: str) -> Any:
        raise NotImplementedError

    def _reader(self, place: str) -> Any:
        raise NotImplementedError

    def save(self, values: Values, address: str, tag: str) -> None:
        self._stock.save(values, storage_writer=self._writer(f"{address}/{tag}"), no_dist=True)

    def begin(self, values: Values, address: str, tag: str) -> Callable[[], object]:
        writer = self._writer(f"{address}/{tag}")
        future: Any = self._stock.async_save(values, storage_writer=writer, no_dist=True)
        return future.result  # type: ignore[no-any-return]

    def load(self, wanted: Shapes, address: str, tag: str) -> Values:
        import torch

        values = {name: torch.empty(*shape) for name, shape in wanted.items()}
        self._stock.load(values, storage_reader=self._reader(f"{address}/{tag}"), no_dist=True)
        return values


class Connector(Dcp):
    """s3torchconnector, Amazon's."""

    def __init__(self) -> None:
        super().__init__()
        from s3torchconnector import S3ClientConfig, dcp
        from s3torchconnector._s3client import S3Client

        # Its writer and its reader take no endpoint: they think of Amazon's own servers alone.
        config = S3ClientConfig(force_path_style=True)
        self._client = partial(S3Client, REGION, endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)
        self._dcp: Any = dcp

    def _writer(self, place: str) -> Any:
        writer = self._dcp.S3StorageWriter(REGION, place, thread_count=os.cpu_count() or 1)
        writer.fs._client = self._client()
        return writer

    def _reader(self, place: str) -> Any:
        reader = self._dcp.S3StorageReader(REGION, place)
        reader.fs._client = self._client()
        return reader


class Fsspec(Dcp):
    """torch's own writer and reader for fsspec, with s3fs."""

    def __init__(self) -> None:
        super().__init__()
        import s3fs  # noqa: F401  # loaded before the clock starts
        from torch.distributed.checkpoint import _fsspec_filesystem

        self._fsspec: Any = _fsspec_filesystem

    def _writer(self, place: str) -> Any:
        return self._fsspec.FsspecWriter(place, sync_files=False, thread_count=os.cpu_count() or 1)

    def _reader(self, place: str) -> Any:
        return self._fsspec.FsspecReader(place)


class Nxd(Contender):
    """neuronx-distributed's own code for S3, in the layout that is its default: a file of torch.save for each rank."""

    _FILE = "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"

    def __init__(self) -> None:
        from neuron_compat import nxd_on_cpu

        folder = os.environ.get("NXD_REAL", "")
        if not folder:
            raise ImportError("NXD_REAL names no folder that has neuronx-distributed (tests/README.md)")
        sys.path += [str(Path(folder, "nxd/src")), str(Path(folder, "extra"))]
        nxd_on_cpu.prepare()
        from neuronx_distributed.trainer import checkpoint_storage

        self._storage: Any = checkpoint_storage.create_checkpoint_storage

    def save(self, values: Values, address: str, tag: str) -> None:
        storage = self._storage(address)
        storage.save_text("1", f"{tag}/checkpoint")
        storage.save_object(values, f"{tag}/{self._FILE}")
        storage.save_text("1", f"{tag}/done")

    def load(self, wanted: Shapes, address: str, tag: str) -> Values:
        found = self._storage(address).load_object(f"{tag}/{self._FILE}")
        return {name: found[name] for name in wanted}


def _parts(address: str, tag: str) -> tuple[str, str]:
    """The bucket, and what names below it begin with."""
    bucket, _, key = address.removeprefix("s3://").partition("/")
    return bucket, f"{key}/{tag}"


def _side_by_side(work: Callable[[Item], Answer], items: Iterable[Item]) -> dict[Item, Answer]:
    """Do it for all items, some of them at once."""
    names = list(items)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(names, pool.map(work, names), strict=True))


def _tensor(data: Any, shape: Sequence[int], *, copied: bool = False) -> Any:
    import numpy as np
    import torch

    array = np.frombuffer(data, np.float32).reshape(tuple(shape))
    return torch.from_numpy(array.copy() if copied else array)
