"""What a save or a load did, on this rank: values that callers receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from xla_ckpt.engine.phases import Phase, as_line, rate


def _html(report: SaveReport | LoadReport) -> str:
    """What a notebook shows of a report."""
    from xla_ckpt.tables import bars, html

    facts = {name: getattr(report, name) for name in type(report).__slots__}
    phases = {name: asdict(phase) for name, phase in report.phases.items()}
    return html.fragment(bars.of_call({**facts, "phases": phases}))


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a finished save did, on this rank."""

    path: str
    tag: str
    sequence: int
    """Commit number."""

    nbytes: int
    """Array bytes that this rank wrote."""

    files: int
    """Payload files that this rank wrote."""

    shared: int = 0
    """Array bytes that this rank did not write, since an earlier tag has a file of them (`SaveOptions.share`)."""

    seconds: float
    """From the start of the background work to the commit."""

    stall: float = 0.0
    """Seconds that the caller waited for the snapshot, and the program's writers for it afterwards."""

    phases: Mapping[str, Phase] = field(default_factory=dict, repr=False)
    """Where the time went (see `xla_ckpt.engine.phases.SAVE_PHASES`); `repr` leaves it out."""

    error: BaseException | None = None
    """Why the save failed, in the report that `on_report` has of it. Then `sequence` is 0."""

    def _repr_html_(self) -> str:
        return _html(self)

    @property
    def in_words(self) -> str:
        """What the log says of it."""
        speed, phases, waited = rate(self.nbytes, self.seconds), as_line(dict(self.phases)), 1e3 * self.stall
        took = f"{self.seconds:.2f} s ({speed}), of which the caller waited {waited:.1f} ms"
        return f"saved tag {self.tag} in {took}: {phases}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a finished load did, on this rank."""

    path: str
    tag: str
    """The tag that was loaded. Empty where a load failed that was to take the newest."""

    skipped: tuple[str, ...] = ()
    """With ``strict=False``: what did not fit and was left alone, with the reason."""

    corrupt_tags: tuple[str, ...] = ()
    """Newer tags that were passed over because they are damaged."""

    arrays: int = 0
    """Arrays that were restored."""

    needed_bytes: int = 0
    """Bytes of those."""

    read_bytes: int = 0
    """Bytes that were read for them. Those of large tensors of the CPU, which are overwritten in place, count twice:
    they are read first to verify them, and then again, out of the page cache, into their places."""

    proven_bytes: int = 0
    """With ``prove=True``: bytes that were read back from memory, and compared with the tag. Copies on several local
    devices count each."""

    unproven: tuple[str, ...] = ()
    """With ``prove=True``: arrays whose bytes cannot be compared, with the reason."""

    seconds: float = 0.0
    """From the call to its end."""

    phases: Mapping[str, Phase] = field(default_factory=dict, repr=False)
    """Where the time went (see `xla_ckpt.engine.phases.LOAD_PHASES`); `repr` leaves it out."""

    error: Exception | None = None
    """Why the load failed, in the report that `on_report` has of it."""

    def _repr_html_(self) -> str:
        return _html(self)
