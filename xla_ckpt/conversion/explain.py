"""Explain a restore on another mesh before any array byte is read.

Tags of this library need neither torch nor orbax.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xla_ckpt.conversion.llama.job import LlamaJob, read_model_info
from xla_ckpt.conversion.source import ProgramInfo, open_source, resolve_source
from xla_ckpt.core.manifest.manifest import Manifest, UnreadableArray
from xla_ckpt.core.plan.explain import Explanation, explain_manifest
from xla_ckpt.core.sharding.mesh import Mesh, parse_mesh
from xla_ckpt.core.sharding.sharding import ShardingRules, parse_rules
from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import CorruptCheckpointError, UsageError
from xla_ckpt.formats.tags import find_foreign_tag
from xla_ckpt.keywords import check_arguments_and_fields
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.storage.resolve import PathLike

MAX_STAGE_RANKS = 4096
"""Maximum number of ranks of a pipeline stage for which a restore is planned. Ranks are planned one by one, so that
time and memory grow with their number."""


@check_arguments_and_fields(llama=LlamaJob)
def explain(
    path: PathLike,
    tag: str | None = None,
    *,
    mesh: Mesh | str,
    shardings: ShardingRules | None = None,
    model: Any = None,
    optimizer: Any = None,
    llama: LlamaJob | None = None,
) -> Explanation:
    """Report the files and bytes that a restore on another mesh would read, and every reason why it would fail.

    Only the manifest is read; payload files are only checked for existence and size. The new sharding of arrays is
    derived from the old one (tensor-parallel dims over tp, ZeRO-1 rows over dp), unless a rule overrides it.

    Args:
        path: Root directory; or a file written by torch.save.
        tag: Tag to explain; None selects the newest.
        mesh: Mesh to restore on, or its text: ``"pp=1,dp=2,tp=4"``. A pipeline stage has at most 4,096 ranks.
        shardings: Rules as in `save_checkpoint`, matched against leaf paths.
        model: For tags of other libraries: information that their files do not contain, as for `convert`.
        optimizer: As `model`.
        llama: Alternative to `model`: a Llama-like model and its form in the job.

    Returns:
        An `Explanation`: `ok`, `problems`, `notes`, and per rank the bytes needed and read, by file.

    Raises:
        NoCheckpointError: The tag does not exist.
        CorruptCheckpointError: The manifest is corrupt.
        UsageError: The mesh or a rule is invalid, or a pipeline stage of the mesh has more than 4,096 ranks.

    Example:
        ``print(xla_ckpt.explain("ckpt", mesh="dp=2,tp=4").problems)``
    """
    store, tag = resolve_source(path, tag)
    over = parse_mesh(mesh) or Mesh()
    if over.size // over.pp > MAX_STAGE_RANKS:
        raise UsageError(
            "a restore is planned for fewer ranks",
            expected=f"a pipeline stage of at most {MAX_STAGE_RANKS:,} ranks",
            found=f"{over.size // over.pp:,} in {over}",
            hint="Take a smaller dp: of arrays that are not split over it, each of its ranks reads the same.",
        )
    rules = parse_rules(shardings)
    about = ProgramInfo(rules=rules, model=model, optimizer=optimizer, llama=read_model_info(llama))
    with open_source(store, tag, about, masters=True) as reader:
        explanation = explain_manifest(reader.manifest, store.path, tag, over, rules)
        more = [*_explain_unknown_arrays(reader.manifest), *_find_broken_files(reader)]
        notes = [
            *explanation.notes,
            *_note_rank_members(reader.manifest, over),
            *_note_rank_states(reader.manifest, over),
        ]
        if (divergence := reader.describe_divergence()) is not None:
            notes.append(divergence)
        if find_foreign_tag(store, tag) is not None:
            notes += _note_split_arrays(reader.manifest)
        if reader.manifest.object_files:
            count = len(reader.manifest.object_files)
            notes.append(f"{count} values are pickled: loading them needs trust_pickle=True (--trust-pickle)")
    return replace(explanation, problems=(*explanation.problems, *more), notes=tuple(notes))


def _explain_unknown_arrays(manifest: Manifest) -> list[str]:
    """Describe the arrays whose sharding is unknown: each reason once, with the arrays that it applies to."""
    problems = []
    for group in UnreadableArray.group_by_reason(manifest.unreadable):
        leaf, array = next(iter(group.items()))
        text = str(array.create_error(leaf))
        if len(group) > 1:
            named = f"{len(group)} arrays: {paths.format_leaves(list(group))}"
            alike = len({(other.expected, other.found) for other in group.values()}) == 1
            facts = [("expected", array.expected), ("found", array.found)] if alike else []
            compared = ", ".join(f"{word} {fact}" for word, fact in facts if fact is not None)
            text = f"{array.problem} [{named}]" + (f": {compared}" if compared else "")
            text += f". {array.format_hint(leaf)}" if array.hint else ""
        problems.append(text)
    return problems


def _note_split_arrays(manifest: Manifest) -> list[str]:
    """Return a note if a tag of another library contains arrays in several shards whose mesh axes are unknown."""
    cut = [leaf for leaf, r in manifest.arrays.items() if r.spec is None and r.metadata.shard_count > 1]
    if not cut:
        return []
    fact = (
        f"{paths.format_leaves(cut)}: stored in several parts, and nothing says over which axes the job had them split"
    )
    why = "Every rank is taken to read them whole; with FSDP2 or tensor parallelism it reads its own part only"
    return [f"{fact}. {why}. Rules say so: shardings= (--sharding)"]


def _find_broken_files(reader: TagReader) -> list[str]:
    """Describe payload files that are missing or have the wrong size."""
    problems = []
    for number in range(len(reader.manifest.files)):
        try:
            reader.open_file(number)
        except CorruptCheckpointError as error:
            problems.append(str(error))
    return problems


def _note_rank_states(manifest: Manifest, mesh: Mesh) -> list[str]:
    """Return a note about rank-local optimizer state that another mesh may not be able to load."""
    optimizer = manifest.skeleton.get(schema.OPTIMIZER) if isinstance(manifest.skeleton, dict) else None
    own = optimizer.get(schema.PER_RANK_STATE) if isinstance(optimizer, dict) else None
    ranks = schema.get_saved_rank_count(own)
    if ranks is None or schema.has_same_ranks(own, mesh.size, str(mesh)):
        return []
    path = schema.get_per_rank_state_path()
    text = f"{path} holds state of each of {ranks} ranks: over {mesh} it needs a function in per_rank="
    return [f"{text} of the OptimizerSchema, which makes theirs of it"]


def _note_rank_members(manifest: Manifest, mesh: Mesh) -> list[str]:
    """Return notes about rank-local members of `extras` that another mesh may not be able to load."""
    extras = manifest.skeleton.get(schema.EXTRAS, {}) if isinstance(manifest.skeleton, dict) else {}
    return [
        f"{schema.get_extras_path(name)} holds a state for each of {ranks} ranks: over {mesh} a PerRank member of an "
        "unknown class needs position= or reshard=, and RNGState leaves the generators of further ranks as they are"
        for name, member in (extras.items() if isinstance(extras, dict) else ())
        if (ranks := schema.get_saved_rank_count(member)) is not None
        and not schema.has_same_ranks(member, mesh.size, str(mesh))
    ]
