"""Explaining a restore before any array byte is read. Our own tags need neither torch nor orbax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xla_ckpt.api.llama import LlamaJob, known_model
from xla_ckpt.api.opened import Knowledge, opened, source_of
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CorruptCheckpointError, UsageError
from xla_ckpt.keywords import taking_values
from xla_ckpt.layouts.listing import find_foreign
from xla_ckpt.manifest.records import Manifest, UnknownArray
from xla_ckpt.plan.explain import Explanation, explain_manifest
from xla_ckpt.sharding.mesh import Mesh, as_mesh
from xla_ckpt.sharding.rules import Rules, parse_rules
from xla_ckpt.storage.door import PathLike
from xla_ckpt.tree import path as paths
from xla_ckpt.tree import schema

MAX_STAGE = 4096
"""Ranks of a pipeline stage for which a restore is planned, one after another: time and memory grow with them."""


@taking_values(llama=LlamaJob)
def explain(
    path: PathLike,
    tag: str | None = None,
    *,
    mesh: Mesh | str,
    shardings: Rules | None = None,
    model: Any = None,
    optimizer: Any = None,
    llama: LlamaJob | None = None,
) -> Explanation:
    """Say what a restore over another mesh would read from where, how much, and every reason why it would fail.

    Only the manifest is read; of the payload files only existence and size are looked at. How arrays would be split
    is taken from how they were (tensor-parallel dims over tp, ZeRO-1's rows over dp), unless a rule says otherwise.

    Args:
        path: Root directory; or a file that torch.save wrote.
        tag: Which checkpoint; None takes the newest.
        mesh: The mesh to restore on, or its text: ``"pp=1,dp=2,tp=4"``. A pipeline stage has at most 4,096 ranks.
        shardings: Rules as in `save_checkpoint`, found in leaf paths.
        model: For tags that another library wrote: what their files do not say, as for `convert`.
        optimizer: Likewise.
        llama: In place of `model`: a Llama-like model, and how the job had it.

    Returns:
        An `Explanation`: `ok`, `problems`, `notes`, and per rank the bytes needed and read, by file.

    Raises:
        NoCheckpointError: There is no such tag.
        CorruptCheckpointError: Its manifest is damaged.
        UsageError: Mesh or rules make no sense, or a pipeline stage of the mesh has more than 4,096 ranks.

    Example:
        ``print(xla_ckpt.explain("ckpt", mesh="dp=2,tp=4").problems)``
    """
    store, tag = source_of(path, tag)
    over = as_mesh(mesh) or Mesh()
    if over.size // over.pp > MAX_STAGE:
        raise UsageError(
            "a restore is planned for fewer ranks",
            expected=f"a pipeline stage of at most {MAX_STAGE:,} ranks",
            found=f"{over.size // over.pp:,} in {over}",
            hint="Take a smaller dp: of arrays that are not split over it, each of its ranks reads the same.",
        )
    rules = parse_rules(shardings)
    about = Knowledge(rules=rules, model=model, optimizer=optimizer, known=known_model(llama))
    with opened(store, tag, about, masters=True) as reader:
        explanation = explain_manifest(reader.manifest, store.path, tag, over, rules)
        more = [*_unknown(reader.manifest), *_broken_files(reader)]
        notes = [*explanation.notes, *_own_members(reader.manifest, over), *_own_states(reader.manifest, over)]
        if (divergence := reader.divergence()) is not None:
            notes.append(divergence)
        if find_foreign(store, tag) is not None:
            notes += _cut(reader.manifest)
        if reader.manifest.objects:
            count = len(reader.manifest.objects)
            notes.append(f"{count} values are pickled: loading them needs trust_pickle=True (--trust-pickle)")
    return replace(explanation, problems=(*explanation.problems, *more), notes=tuple(notes))


def _unknown(manifest: Manifest) -> list[str]:
    """Arrays of which it is not known how they were split: each reason once, with the arrays that it is true of."""
    problems = []
    for group in UnknownArray.by_reason(manifest.unknown):
        leaf, array = next(iter(group.items()))
        text = str(array.error(leaf))
        if len(group) > 1:
            named = f"{len(group)} arrays: {paths.listed(list(group))}"
            alike = len({(other.expected, other.found) for other in group.values()}) == 1
            facts = [("expected", array.expected), ("found", array.found)] if alike else []
            compared = ", ".join(f"{word} {fact}" for word, fact in facts if fact is not None)
            text = f"{array.problem} [{named}]" + (f": {compared}" if compared else "")
            text += f". {array.advice(leaf)}" if array.hint else ""
        problems.append(text)
    return problems


def _cut(manifest: Manifest) -> list[str]:
    """A note if another library's tag has arrays in several parts, of which nothing says over which axes they were."""
    cut = [leaf for leaf, r in manifest.arrays.items() if r.spec is None and r.form.cells > 1]
    if not cut:
        return []
    fact = f"{paths.listed(cut)}: stored in several parts, and nothing says over which axes the job had them split"
    why = "Every rank is taken to read them whole; with FSDP2 or tensor parallelism it reads its own part only"
    return [f"{fact}. {why}. Rules say so: shardings= (--sharding)"]


def _broken_files(reader: TagReader) -> list[str]:
    """Payload files that are missing or do not have their size."""
    problems = []
    for number in range(len(reader.manifest.files)):
        try:
            reader.source(number)
        except CorruptCheckpointError as error:
            problems.append(str(error))
    return problems


def _own_states(manifest: Manifest, mesh: Mesh) -> list[str]:
    """State of the optimizer that every rank has its own of, and that another mesh may not take over."""
    optimizer = manifest.skeleton.get(schema.OPTIMIZER) if isinstance(manifest.skeleton, dict) else None
    own = optimizer.get(schema.OWN) if isinstance(optimizer, dict) else None
    ranks = schema.saved_by(own)
    if ranks is None or schema.same_ranks(own, mesh.size, str(mesh)):
        return []
    text = f"{schema.own_states()} holds state of each of {ranks} ranks: over {mesh} it needs a function in per_rank="
    return [f"{text} of the OptimizerSchema, which makes theirs of it"]


def _own_members(manifest: Manifest, mesh: Mesh) -> list[str]:
    """Members of `extras` that every rank has its own of, and that another mesh may not take over."""
    extras = manifest.skeleton.get(schema.EXTRAS, {}) if isinstance(manifest.skeleton, dict) else {}
    return [
        f"{schema.in_extras(name)} holds a state for each of {ranks} ranks: over {mesh} a PerRank member of a class "
        "that is not known needs position= or reshard=, and RNGState leaves the generators of further ranks as they are"
        for name, member in (extras.items() if isinstance(extras, dict) else ())
        if (ranks := schema.saved_by(member)) is not None and not schema.same_ranks(member, mesh.size, str(mesh))
    ]
