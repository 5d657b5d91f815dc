"""The tag that a conversion writes: where it goes, that its name is free, and in which order its files come."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xla_ckpt.api.opened import OpenState
from xla_ckpt.api.replacing import check_place
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.merged import new_head
from xla_ckpt.engine.parity import Covered, covered_files, write_alone
from xla_ckpt.engine.seal import Ending, seal
from xla_ckpt.engine.stream import stream_files
from xla_ckpt.engine.write import write_objects
from xla_ckpt.errors import UsageError
from xla_ckpt.layouts.base import Rewriting
from xla_ckpt.layouts.listing import tag_names
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.plan.merge import merge
from xla_ckpt.plan.parity import Parity
from xla_ckpt.plan.record import Record
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.door import same_directory
from xla_ckpt.storage.small_files import write_small
from xla_ckpt.tags.names import check_tag
from xla_ckpt.tags.root import Kind
from xla_ckpt.tags.roots import root_of
from xla_ckpt.tags.transaction import Transaction


@dataclass(frozen=True, slots=True)
class NewTag:
    """The tag that is to be."""

    store: Store
    tag: str
    mesh: Mesh
    parity: Parity | None
    first_mark: str
    """That of its layout (see `xla_ckpt.layouts.base.Layout`)."""

    @property
    def _in_place(self) -> bool:
        """Whether the files go where the layout's own readers look, which is not where this library's tags lie."""
        return bool(self.first_mark) and self.store.object_store is not None

    def check_free(self, source: Store, tag: str) -> None:
        """Refuse to replace a tag: the one that is read, or another.

        Raises:
            UsageError: It would; or the tag would have parity where no repair finds it.
        """
        check_tag(self.tag, self.store.path)
        if same_directory(source, tag, self.store, self.tag):
            raise UsageError(
                "the new tag would replace the old one",
                path=self.store.path,
                tag=self.tag,
                hint="Pass as_tag= (--as).",
            )
        if self.tag in tag_names(self.store):
            raise UsageError(
                "there is a tag of this name already",
                path=self.store.path,
                tag=self.tag,
                hint="Give the new one another name by as_tag= (--as), or remove this one first.",
            )
        check_place(self.store, self.tag)
        if self.parity is not None and self._in_place:
            raise UsageError(
                "a tag in another library's place in an object store has no parity, which repairs could not use there",
                path=self.store.path,
                tag=self.tag,
                found=f"parity={self.parity!r}",
            )

    def write(self, stored: OpenState, rewriting: Rewriting, crew: Crew, *, max_memory: int) -> None:
        """Write it: all files, then the manifest, then the marks, then the commit.

        Raises:
            CorruptCheckpointError: The old tag is damaged. Nothing was written.
            UsageError: Something has its name, and the storage cannot replace it.
            OSError: The storage refused.
        """
        objects = stored.objects()  # one that is not trusted is found out before anything is written
        files = [file for of_rank in rewriting.files for file in of_rank]
        old, marks = stored.manifest, dict(rewriting.marks)
        root = root_of(self.store)
        with Transaction(root, self.tag, Kind.CHECKPOINT if self._in_place else Kind.TAG) as transaction:
            if self._in_place:
                # If this process is killed, the layout's own library sees that the tag was never complete.
                write_small(transaction.directory, self.first_mark, marks.pop(self.first_mark))
            written = stream_files(stored.reader, transaction.directory, files, crew, max_memory=max_memory)
            records = [*written.files, *write_objects(transaction.directory, objects, 0, self.mesh.size)]
            record = Record.of(
                written.shards,
                rank=0,
                files=tuple(records),
                arrays={
                    leaf: (r.dtype.name, r.shape, rewriting.specs.get(leaf), r.form.weak_type)
                    for leaf, r in old.arrays.items()
                },
                aliases=old.aliases,
                skeleton=old.skeleton,
                module_metadata=old.module_metadata,
                objects=tuple(range(len(written.files), len(records))),
            )
            # One that lies in place is no commit of its root, and has no number there.
            head = new_head(root, self.tag, max(transaction.sequence, 1))
            manifest = merge([record], self.mesh).manifest(head, self.mesh)
            manifest = replace(manifest, arrays=manifest.arrays.with_divergent(old.divergent), parity=self.parity)
            write_parity = None
            if (parity := self.parity) is not None:

                def write_parity(sealed: Manifest, text: bytes) -> None:
                    covered = Covered(transaction.directory, covered_files(sealed))
                    write_alone(covered, parity, text, 1, crew, transaction.directory)

            ending = Ending(index=rewriting.index, marks=marks, parity=write_parity)
            seal(transaction, self.store.path, manifest, ending)
            transaction.commit()
