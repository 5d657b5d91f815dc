"""Values that are plain although no JSON has them: stored without pickle, loaded without trust, exact in type."""

from __future__ import annotations

import array
import datetime
import enum
import sys
import zoneinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_ckpt
from xla_ckpt.core.manifest import manifest_json


class Bits(enum.Flag):
    A = 1
    B = 2


class Loose(enum.IntFlag):
    A = 1


class Own(enum.Flag):
    A = 1
    B = 2

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return super()._missing_(value)


class Meters(int):
    calls = 0

    def __new__(cls, value: int, note: str = "") -> Meters:
        Meters.calls += 1
        made = super().__new__(cls, value)
        made.note = note  # type: ignore[attr-defined]
        return made


class Name(str):
    pass


class Ratio(float):
    pass


class Blob(bytes):
    pass


class Pickled(int):
    def __reduce__(self) -> Any:
        return int, (int(self),)


BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
PADDED = np.dtype([("a", "i1"), ("b", "f8")], align=True)
RECORDS = np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")])

VALUES: dict[str, Any] = {
    "datetime": datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN),
    "time": datetime.time(2, 30, tzinfo=BERLIN),
    "zone": BERLIN,
    "offset": datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=5.5))),
    "flags": Bits.A | Bits.B,
    "no flag": Bits(0),
    "one flag": Bits.A,
    "unknown flags": Loose(6),
    "array": array.array("i", [1, -2]),
    "array of doubles": array.array("d", [-0.0, float("inf")]),
    "empty array": array.array("B"),
    "text": array.array("u", "aé"),
    "void": np.void(b"abc"),
    "void of fields": np.array([(1, 2.5)], dtype=PADDED)[0],
    "padded": np.array([(1, 2.5)], dtype=PADDED),
    "record": RECORDS[1],
    "records": RECORDS,
    "large": 10**5000,
    "large below zero": -(1 << 14_000),
    "largest of JSON": (1 << 14_000) - 1,
    "int": Meters(5, "a note"),
    "str": Name("a"),
    "float": Ratio("nan"),
    "bytes": Blob(b"\0"),
}


def facts(value: Any) -> Any:
    """What has to be the same."""
    shown = hex(value) if type(value) is int else repr(value.tolist() if hasattr(value, "tolist") else value)
    about: list[Any] = [type(value), shown]
    about += [getattr(value, name, None) for name in ("tzinfo", "fold", "typecode", "dtype", "note")]
    return about, value.tobytes() if hasattr(value, "tobytes") else None


def objects_in(root: Path) -> Any:
    return manifest_json.parse_manifest((root / "a" / "manifest.json").read_bytes()).object_files


@pytest.mark.parametrize("name", VALUES)
def test_a_plain_value_comes_back(tmp_path: Path, name: str) -> None:
    value = VALUES[name]
    xla_ckpt.save(tmp_path, "a", {"v": value, "w": torch.ones(1)})
    assert not objects_in(tmp_path)
    calls = Meters.calls
    assert facts(xla_ckpt.restore(tmp_path, "a").tree["v"]) == facts(value)
    assert calls == Meters.calls, "a load runs no code of the program's classes"


@pytest.mark.parametrize(
    "key", [Name("k"), Bits.A | Bits.B, 10**5000, BERLIN, VALUES["datetime"]], ids=lambda k: type(k).__name__
)
def test_a_plain_value_is_a_key(tmp_path: Path, key: Any) -> None:
    xla_ckpt.save(tmp_path, "a", {"v": {key: torch.ones(1)}, "s": {key}})
    assert not objects_in(tmp_path)
    tree = xla_ckpt.restore(tmp_path, "a").tree
    ((again, held),) = tree["v"].items()
    assert (type(again), again, float(held)) == (type(key), key, 1.0)
    assert tree["s"] == {key}


def test_a_generator_draws_the_numbers_that_it_would_have_drawn(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    torch.randn(3, generator=generator)
    xla_ckpt.save(tmp_path, "a", {"g": generator, "w": torch.ones(1)})
    assert not objects_in(tmp_path)
    again = xla_ckpt.restore(tmp_path, "a").tree["g"]
    assert torch.equal(torch.randn(9, generator=again), torch.randn(9, generator=generator))


@pytest.mark.parametrize("value", [Own.A | Own.B, Pickled(3)], ids=["_missing_", "__reduce__"])
def test_a_class_with_code_of_its_own_for_that_is_pickled(tmp_path: Path, value: Any) -> None:
    with pytest.warns(UserWarning, match="will be pickled"):
        xla_ckpt.save(tmp_path, "a", {"v": value, "w": torch.ones(1)})
    assert len(objects_in(tmp_path)) == 1
    assert xla_ckpt.restore(tmp_path, "a", trust_pickle=True).tree["v"] == value


@pytest.mark.parametrize(
    ("name", "now"),
    [("Bits", enum.Flag("Bits", "A")), ("Bits", enum.Enum("Bits", "A")), ("Meters", type("Meters", (str,), {}))],
)
def test_a_class_that_has_changed_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, now: type
) -> None:
    value = {"Bits": Bits.A | Bits.B, "Meters": Meters(3)}[name]
    xla_ckpt.save(tmp_path, "a", {"v": value, "w": torch.ones(1)})
    monkeypatch.setattr(sys.modules[__name__], name, now)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=name):
        xla_ckpt.restore(tmp_path, "a")


def test_a_zone_that_this_machine_does_not_know_is_no_damage(tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path, "a", {"v": BERLIN, "w": torch.ones(1)})
    before = zoneinfo.TZPATH
    zoneinfo.ZoneInfo.clear_cache(only_keys=["Europe/Berlin"])
    zoneinfo.reset_tzpath([str(tmp_path)])
    try:
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="Europe/Berlin"):
            xla_ckpt.restore(tmp_path, "a")
    finally:
        zoneinfo.reset_tzpath(before)
