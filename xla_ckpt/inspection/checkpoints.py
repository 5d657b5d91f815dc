"""`Checkpoints`: the checkpoints of one root directory as an object.

For tags of this library only `read` and `diff` need more than NumPy.
"""

from __future__ import annotations

from typing import Any

from xla_ckpt.conversion.diff import Difference, diff
from xla_ckpt.conversion.llama.job import LlamaJob, read_model_info
from xla_ckpt.conversion.source import ProgramInfo, resolve_source
from xla_ckpt.core.sharding.sharding import ShardingRules, parse_rules
from xla_ckpt.formats.tags import check_own_tag, find_foreign_tag
from xla_ckpt.inspection import tags
from xla_ckpt.inspection.contents import MAX_VALUE_BYTES, ArraySample, TagContents, read_contents, sample_array
from xla_ckpt.inspection.tags import TagSummary, build_listing, summarize_path
from xla_ckpt.keywords import check_arguments, check_arguments_and_fields
from xla_ckpt.loading.verify import VerifyReport
from xla_ckpt.options import ConvertOptions
from xla_ckpt.reports import describe_timings
from xla_ckpt.storage.resolve import PathLike, normalize_path, open_store
from xla_ckpt.storage.threads import READ_THREADS
from xla_ckpt.tags import deletion
from xla_ckpt.tags.listing import check_entry
from xla_ckpt.tags.resolve import open_root
from xla_ckpt.tags.retention import Retention, check_policy, explain_kept
from xla_ckpt.tags.retention_inputs import load_tag_infos
from xla_ckpt.tags.root import Root


class Checkpoints:
    """The checkpoints in a root directory: list them, inspect their contents, and manage retention.

    The object keeps no files open, so that it remains valid after further saves, and several objects are independent.
    In a job of many ranks any rank may use it independently: no method communicates with other ranks.

    Args:
        path: Root directory, which need not exist yet; or another path that `load_checkpoint` accepts. Methods that pin
            and delete accept only root directories of this library's tags.

    Raises (on construction):
        UsageError: The path is invalid.

    Example:
        >>> import torch, xla_ckpt
        >>> runs = xla_ckpt.Checkpoints("memory://lm")
        >>> xla_ckpt.save("memory://lm", "step_10", {"w": torch.ones(2), "step": 10}).result().tag
        'step_10'
        >>> runs.tags(), runs.latest(), runs.read("w").tolist(), runs.read("step")
        (['step_10'], 'step_10', [1.0, 1.0], 10)
    """

    @check_arguments
    def __init__(self, path: PathLike) -> None:
        self.path = normalize_path(path)
        """Root directory."""

    def __repr__(self) -> str:
        return f"Checkpoints({self.path!r})"

    def tags(self) -> list[str]:
        """Return the names of the committed tags, oldest commit first (see `list_tags`).

        Raises:
            StorageError: The directory cannot be read. (A directory that does not exist has no tags.)
        """
        return tags.list_tags(self.path)

    def latest(self) -> str | None:
        """Return the newest committed tag; None if there are no tags.

        Raises:
            StorageError: The directory cannot be read.
        """
        return tags.latest_tag(self.path)

    def summaries(self) -> tuple[TagSummary, ...]:
        """Return summaries of all tags, oldest commit first. A damaged tag has a `problem`.

        For a path that is itself one checkpoint, such as a torch.save file, return its summary.

        Raises:
            StorageError: The directory cannot be read.
        """
        return summarize_path(self.path)

    @check_arguments_and_fields(llama=LlamaJob)
    def show(
        self,
        tag: str | None = None,
        *,
        leaf: str | None = None,
        shardings: ShardingRules | None = None,
        model: Any = None,
        optimizer: Any = None,
        llama: LlamaJob | None = None,
    ) -> TagContents:
        """Return the contents of a tag. Reads only its manifest, or the headers of the files of other libraries.

        Args:
            tag: Name of the checkpoint; None shows the newest.
            leaf: Only leaves at or below this path, or that match this glob pattern.
            shardings: For tags of other libraries: information that their files do not contain, as for `convert`.
            model: Model, for the same purpose.
            optimizer: Optimizer, for the same purpose.
            llama: Description of a Llama-like model, for the same purpose.

        Raises:
            NoCheckpointError: The tag does not exist.
            CorruptCheckpointError: Its manifest is damaged.
            UsageError: No leaf matches `leaf`.
        """
        store, name = resolve_source(self.path, tag)
        rules, known = parse_rules(shardings), read_model_info(llama)
        return read_contents(store, name, ProgramInfo(rules=rules, model=model, optimizer=optimizer, llama=known), leaf)

    @check_arguments_and_fields(llama=LlamaJob)
    def sample(
        self,
        leaf: str,
        tag: str | None = None,
        *,
        shardings: ShardingRules | None = None,
        model: Any = None,
        optimizer: Any = None,
        llama: LlamaJob | None = None,
        max_bytes: int = MAX_VALUE_BYTES,
    ) -> ArraySample:
        """Return the stored parts of an array and statistics of its values. All bytes that are read are verified.

        Args:
            leaf: Leaf path, as returned by `show`.
            tag: Name of the checkpoint; None samples the newest.
            shardings: For tags of other libraries: information that their files do not contain, as for `show`.
            model: Model, for the same purpose.
            optimizer: Optimizer, for the same purpose.
            llama: Description of a Llama-like model, for the same purpose.
            max_bytes: Maximum number of bytes to read; of a larger array 16 evenly spaced pieces are read.

        Raises:
            NoCheckpointError: The tag does not exist.
            IncompatibleCheckpointError: The array does not exist, or its sharding is unknown.
            CorruptCheckpointError: Bytes that were read are damaged.
        """
        store, name = resolve_source(self.path, tag)
        rules, known = parse_rules(shardings), read_model_info(llama)
        about = ProgramInfo(rules=rules, model=model, optimizer=optimizer, llama=known)
        return sample_array(store, name, leaf, about, max_bytes)

    def timings(self, tag: str | None = None) -> dict[str, Any]:
        """Return the timings of the ranks that saved a tag, until its commit; slowest rank first.

        Args:
            tag: Name of the checkpoint; None uses the newest.

        Returns:
            The output of ``xla-ckpt show --report --json`` (docs/reports.md).

        Raises:
            NoCheckpointError: The tag does not exist.
            UsageError: The tag contains no such report.
            FormatError: The report is damaged.
        """
        store, name = resolve_source(self.path, tag)
        report = open_root(store).read_report(name) if find_foreign_tag(store, name) is None else None
        return describe_timings(report, store.path, name)

    def _repr_html_(self) -> str:
        from xla_ckpt.rendering import html, reports

        return html.render_html(reports.render_tag_list(build_listing(self.path, self.summaries())))

    @check_arguments
    def read(
        self,
        leaf: str = "",
        tag: str | None = None,
        *,
        shardings: ShardingRules | None = None,
        trust_pickle: bool = False,
    ) -> Any:
        """Read one leaf of a tag, or a part of the state, into host memory, and verify its bytes.

        Nothing else of the tag is read. Waits for a save of this process to the directory.

        Args:
            leaf: Leaf path, such as ``"model/layers.0.weight"``, as returned by `show`; or the path of a part, such as
                ``"model"``.
            tag: Name of the checkpoint; None reads the newest valid one.
            shardings: For tags of other libraries: the sharding of the arrays in the job that saved them.
            trust_pickle: Load pickled objects, which can run any code.

        Returns:
            The same as `restore`: a whole array with its global shape (a tensor on the CPU, a numpy or a jax array, as
                it was saved), or a plain value; for a part, the tree of them.

        Raises:
            NoCheckpointError: The tag does not exist, or there are no tags.
            IncompatibleCheckpointError: The leaf is not stored, or its sharding is unknown.
            CorruptCheckpointError: The bytes to be read are damaged.
            UntrustedObjectError: The leaf contains pickled objects, and `trust_pickle` is False.
        """
        from xla_ckpt.loading.load import read_part

        return read_part(self.path, tag, leaf, shardings=shardings, trust=trust_pickle)

    @check_arguments
    def verify(self, tag: str | None = None, *, num_workers: int = READ_THREADS) -> VerifyReport:
        """Read a whole tag, the newest by default, and compare every byte with its digest (see `xla_ckpt.verify`).

        Raises:
            NoCheckpointError: The tag does not exist.
        """
        return tags.verify(self.path, tag, num_workers=num_workers)

    @check_arguments
    def repair(self, tag: str | None = None, *, num_workers: int = READ_THREADS) -> tuple[str, ...]:
        """Repair a tag that was saved with parity (see `xla_ckpt.repair`).

        Raises:
            CheckpointError: As `xla_ckpt.repair`.
        """
        return tags.repair(self.path, tag, num_workers=num_workers)

    @check_arguments
    def delete(self, tag: str, *, force: bool = False) -> None:
        """Delete a tag atomically, as retention does; open readers can continue to read it.

        Args:
            tag: Name of the tag.
            force: Delete it even if it is pinned, in use by a reader, or the last tag.

        Raises:
            NoCheckpointError: The tag does not exist.
            UsageError: The tag is pinned, in use by a reader, or the last tag, and `force` is False; or it is being
                saved; or another library wrote it.
            StorageError: The storage failed.
        """
        deletion.delete_tag(self._get_own_root(tag), tag, force=force)

    @check_arguments
    def pin(self, tag: str) -> bool:
        """Exempt a tag from retention, as `save_checkpoint(..., pinned=True)` does; False if it was exempt already.

        A concurrent save of another tag keeps the tag if it has not applied its retention yet.

        Raises:
            NoCheckpointError: The tag does not exist, or a concurrent save retired it.
            CorruptCheckpointError: Its manifest is damaged.
            UsageError: The tag is being saved; or another library wrote it, and this library never deletes it.
            StorageError: The storage failed.
        """
        return self._get_own_root(tag).pin(tag, True)

    @check_arguments
    def unpin(self, tag: str) -> bool:
        """Undo `pin`; False if the tag was not pinned. The next save that retires tags may delete it.

        Raises:
            CheckpointError: As `pin`.
        """
        return self._get_own_root(tag).pin(tag, False)

    def why_kept(self, retention: Retention) -> dict[str, tuple[str, ...]]:
        """Return the reasons why a policy keeps each tag. A save with this policy deletes tags without reasons.

        Args:
            retention: Retention policy, such as ``LatestN(3) | BestN("loss")``.

        Returns:
            Each tag of this library, oldest first, with its reasons.

        Raises:
            UsageError: The policy is invalid.
            StorageError: The directory cannot be read.
        """
        check_policy("retention", retention)
        root = open_root(open_store(self.path).snapshot_view())
        # Entries are checked, because the caller may delete tags next. A save knows that the newest tag is valid.
        entries = [check_entry(root.store, entry) for entry in root.list_entries()]
        return explain_kept(load_tag_infos(root.store, entries), retention)

    @check_arguments_and_fields(options=ConvertOptions)
    def diff(
        self, tag_a: str, tag_b: str | None = None, *, leaf: str | None = None, options: ConvertOptions | None = None
    ) -> Difference:
        """Compare two tags, the second the newest by default. `xla_ckpt.diff` also compares tags of two directories.

        Args:
            tag_a: Name of the first tag.
            tag_b: Name of the second tag.
            leaf: Compare only leaves at or below this path, or that match this glob pattern.
            options: Limits of memory and threads; by default those of `default_options`.

        Raises:
            CheckpointError: As `xla_ckpt.diff`.
        """
        return diff(self.path, self.path, tag_a, tag_b, leaf=leaf, options=options)

    def _get_own_root(self, tag: str) -> Root:
        """Return the root directory, if the tag exists and belongs to this library.

        Raises:
            NoCheckpointError: The tag does not exist.
            UsageError: Another library wrote the tag.
        """
        store = open_store(self.path)
        check_own_tag(store, tag)
        return open_root(store)
