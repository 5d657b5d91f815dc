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
    """The checkpoints in a root directory: which there are, what they hold, and which are kept.

    It holds nothing open, so that it is as good after a save as before, and two of them do not disturb each other. In
    a job of many ranks any one rank may use it alone: no method meets other ranks.

    Args:
        path: Root directory, which need not exist yet; or what `load_checkpoint` takes in its place. Methods that pin
            and delete take root directories of this library's tags only.

    Raises (on construction):
        UsageError: It is no path.

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
        """Names of the committed tags, oldest commit first (see `list_tags`).

        Raises:
            StorageError: The directory cannot be read. (One that does not exist has no tags.)
        """
        return tags.list_tags(self.path)

    def latest(self) -> str | None:
        """The newest committed tag; None when there is none.

        Raises:
            StorageError: The directory cannot be read.
        """
        return tags.latest_tag(self.path)

    def summaries(self) -> tuple[TagSummary, ...]:
        """All tags, oldest commit first, with what a list says of each. A damaged one has a `problem`.

        Of a path that is one checkpoint itself, such as a file of torch.save, it is that one.

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
        """Say what a tag holds. Only its manifest is read; of tags of other libraries, the heads of their files.

        Args:
            tag: Which checkpoint; None takes the newest.
            leaf: Only leaves at or below this path, or like this pattern of a shell.
            shardings: For tags that another library wrote: what their files do not say, as for `convert`.
            model: Likewise.
            optimizer: Likewise.
            llama: Likewise, of a Llama-like model.

        Raises:
            NoCheckpointError: There is no such tag.
            CorruptCheckpointError: Its manifest is damaged.
            UsageError: No leaf is like `leaf`.
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
        """Say how an array lies in a tag, and give numbers about its values. What is read is verified.

        Args:
            leaf: Leaf path, as `show` gives it.
            tag: Which checkpoint; None takes the newest.
            shardings: For tags that another library wrote: what their files do not say, as for `show`.
            model: Likewise.
            optimizer: Likewise.
            llama: Likewise, of a Llama-like model.
            max_bytes: Of a larger array 16 pieces are read, which lie at equal distances.

        Raises:
            NoCheckpointError: There is no such tag.
            IncompatibleCheckpointError: There is no such array, or nothing says how it was split.
            CorruptCheckpointError: What was read is damaged.
        """
        store, name = resolve_source(self.path, tag)
        rules, known = parse_rules(shardings), read_model_info(llama)
        about = ProgramInfo(rules=rules, model=model, optimizer=optimizer, llama=known)
        return sample_array(store, name, leaf, about, max_bytes)

    def timings(self, tag: str | None = None) -> dict[str, Any]:
        """Say what the ranks measured of the save of a tag, until its commit; the slowest rank first.

        Args:
            tag: Which checkpoint; None takes the newest.

        Returns:
            What ``xla-ckpt show --report --json`` prints (docs/reports.md).

        Raises:
            NoCheckpointError: There is no such tag.
            UsageError: The tag keeps no such report.
            FormatError: What it keeps is damaged.
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
        """Read one leaf of a tag, or a part of the state, into memory of the host. Its bytes are verified.

        Nothing else of the tag is read. A save of this process into the directory is waited for.

        Args:
            leaf: Leaf path, such as ``"model/layers.0.weight"``, as `show` gives them; or that of a part, such as
                ``"model"``.
            tag: Which checkpoint; None takes the newest one that is not damaged.
            shardings: For tags that another library wrote: how the job that saved had arrays split.
            trust_pickle: Load pickled objects, which can run any code.

        Returns:
            What `restore` returns: a whole array, of the shape that it has over all ranks (a tensor on the CPU, a numpy
            or a jax array, as it was saved), or a plain value; of a part, the tree of them.

        Raises:
            NoCheckpointError: There is no such tag, or none at all.
            IncompatibleCheckpointError: Nothing of this name is stored, or nothing says how it was split.
            CorruptCheckpointError: What would be read is damaged.
            UntrustedObjectError: It holds pickled objects, and `trust_pickle` is False.
        """
        from xla_ckpt.loading.load import read_part

        return read_part(self.path, tag, leaf, shardings=shardings, trust=trust_pickle)

    @check_arguments
    def verify(self, tag: str | None = None, *, num_workers: int = READ_THREADS) -> VerifyReport:
        """Read a whole tag, the newest by default, and compare every byte with its digest (see `xla_ckpt.verify`).

        Raises:
            NoCheckpointError: There is no such tag.
        """
        return tags.verify(self.path, tag, num_workers=num_workers)

    @check_arguments
    def repair(self, tag: str | None = None, *, num_workers: int = READ_THREADS) -> tuple[str, ...]:
        """Give a tag that was saved with parity back the bytes that it has lost (see `xla_ckpt.repair`).

        Raises:
            CheckpointError: As `xla_ckpt.repair`.
        """
        return tags.repair(self.path, tag, num_workers=num_workers)

    @check_arguments
    def delete(self, tag: str, *, force: bool = False) -> None:
        """Delete a tag, as retention would: it disappears in one step, and who reads it meanwhile reads on.

        Args:
            tag: Which tag.
            force: Delete it although it is pinned, or being read, or the last one.

        Raises:
            NoCheckpointError: There is no such tag.
            UsageError: It is pinned, being read, or the last one, and `force` is False; or it is being saved; or
                another library wrote it.
            StorageError: The storage refused.
        """
        deletion.delete_tag(self._get_own_root(tag), tag, force=force)

    @check_arguments
    def pin(self, tag: str) -> bool:
        """Exempt a tag from retention, as `save_checkpoint(..., pinned=True)` does; False if it was exempt already.

        A save of another tag may run meanwhile: it keeps the tag if it has not come to its retention yet.

        Raises:
            NoCheckpointError: There is no such tag, or a save retired it meanwhile.
            CorruptCheckpointError: Its manifest is damaged.
            UsageError: It is being saved; or another library wrote it: no retention of ours deletes such tags.
            StorageError: The storage refused.
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
        """Say why a policy keeps each tag. A save with this policy deletes those for which there is no reason.

        Args:
            retention: Which tags are kept, such as ``LatestN(3) | BestN("loss")``.

        Returns:
            Each tag of this library, oldest first, and the reasons.

        Raises:
            UsageError: It is no policy.
            StorageError: The directory cannot be read.
        """
        check_policy("retention", retention)
        root = open_root(open_store(self.path).snapshot_view())
        # Whoever asks may be about to delete. A save needs no such look: it knows that the newest tag is sound.
        entries = [check_entry(root.store, entry) for entry in root.list_entries()]
        return explain_kept(load_tag_infos(root.store, entries), retention)

    @check_arguments_and_fields(options=ConvertOptions)
    def diff(
        self, tag_a: str, tag_b: str | None = None, *, leaf: str | None = None, options: ConvertOptions | None = None
    ) -> Difference:
        """Compare two tags, the second the newest by default. `xla_ckpt.diff` compares tags of two directories, too.

        Args:
            tag_a: Which tag.
            tag_b: Which other tag.
            leaf: Compare only leaves at or below this path, or like this pattern of a shell.
            options: How much memory and how many threads it takes; by default those of `default_options`.

        Raises:
            CheckpointError: As `xla_ckpt.diff`.
        """
        return diff(self.path, self.path, tag_a, tag_b, leaf=leaf, options=options)

    def _get_own_root(self, tag: str) -> Root:
        """The root directory, if the tag is there and is no other library's."""
        store = open_store(self.path)
        check_own_tag(store, tag)
        return open_root(store)
