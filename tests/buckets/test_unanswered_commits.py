"""The one request that commits a tag is refused, or not answered: nothing is told to have failed that is there."""

from __future__ import annotations

from typing import Any

import pytest

import xla_ckpt
from tests.buckets.s3_server import Fault, S3Server
from tests.buckets.test_jobs import files_of, ledger_of
from tests.tags.test_ledger import begin, put, text_of
from xla_ckpt.errors import StorageError, UnknownOutcomeError, from_json
from xla_ckpt.storage import remote_client
from xla_ckpt.tags.entry import LEDGER_NAME
from xla_ckpt.tags.ledger_record import WRITE_ATTEMPTS

KINDS = ["before503", "after503", "after500", "drop", "refuse403", "refuse409"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is sent once: what obstore repeats by itself would hide most faults."""
    monkeypatch.setattr(remote_client, "MAX_RETRIES", 0)


@pytest.mark.parametrize("count", [1, WRITE_ATTEMPTS, 2 * WRITE_ATTEMPTS, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_commit_says_is_what_is_there(root: str, s3: S3Server, kind: Any, count: int) -> None:
    """Writes of the ledger fail, so many of them; reads do not."""
    ledger = ledger_of(root)
    put(ledger, "a", "old")
    transaction = begin(ledger, "a", "new")
    if kind == "refuse409":
        count = min(count, 2 * WRITE_ATTEMPTS)  # it means "try again", and that is done
    s3.faults.append(Fault("PUT", f"/{LEDGER_NAME}", kind, count))
    said: Exception | None = None
    try:
        transaction.commit()
    except (OSError, UnknownOutcomeError) as error:
        said = error
    s3.faults.clear()
    found = text_of(ledger, "a")
    if said is None:
        assert found == "new"
    elif isinstance(said, UnknownOutcomeError):
        assert (said.tag, said.path) == ("a", root)
        assert kind == "before503", "what the store refuses is known to have failed"
        assert count > WRITE_ATTEMPTS
    else:
        assert found == "old"
    applied = kind in ("after503", "after500", "drop", "refuse409")
    assert (said is None) == (applied or count < WRITE_ATTEMPTS), "no success was told to have failed"
    transaction.abort()
    assert text_of(ledger, "a") == found
    put(ledger, "b")
    ledger.clean()
    put(ledger, "c")
    ledger.clean()
    put(ledger, "d")
    ledger.clean()
    assert files_of(root) == {its.attempt for its in ledger.read().tags.values()}, "litter"


@pytest.mark.parametrize("arrives", [False, True])
def test_where_nothing_is_answered_the_outcome_is_unknown(root: str, s3: S3Server, arrives: bool) -> None:
    ledger = ledger_of(root)
    put(ledger, "a", "old")
    transaction = begin(ledger, "a", "new")
    s3.faults.append(Fault("PUT", f"/{LEDGER_NAME}", "drop" if arrives else "before503", 100))
    s3.faults.append(Fault("GET", f"/{LEDGER_NAME}", "drop", 100))
    with pytest.raises(UnknownOutcomeError, match="did not answer whether it has committed") as caught:
        transaction.commit()
    again = from_json(caught.value.to_json())
    assert isinstance(again, UnknownOutcomeError)
    assert (again.tag, again.path, "xla-ckpt ls" in str(again)) == ("a", root, True)
    transaction.abort()  # nothing is answered now, either
    s3.faults.clear()
    assert text_of(ledger, "a") == ("new" if arrives else "old")
    put(ledger, "b")
    assert text_of(ledger, "a") == ("new" if arrives else "old")
    assert not ledger.read().open, "the next save has given it up"


def test_a_save_says_that_its_outcome_is_unknown(root: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    xla_ckpt.save(root, "a", {"x": 1})

    def silence(*_: object, **__: object) -> None:
        s3.faults.append(Fault("PUT", f"/{LEDGER_NAME}", "drop", 100))
        s3.faults.append(Fault("GET", f"/{LEDGER_NAME}", "drop", 100))

    monkeypatch.setattr("xla_ckpt.tags.ledger_root.write_file", silence)  # the report, just before the commit
    with pytest.raises(UnknownOutcomeError, match=r"\[tag a, rank 0") as caught:
        xla_ckpt.save(root, "a", {"x": 2})
    assert isinstance(caught.value, xla_ckpt.SaveError)
    assert not isinstance(caught.value, StorageError)
    s3.faults.clear()
    assert xla_ckpt.restore(root, "a").tree == {"x": 2}


@pytest.mark.parametrize(("call", "done"), [("pin", "pinned"), ("delete", "deleted")])
def test_pins_and_deletions_say_that_their_outcome_is_unknown(root: str, s3: S3Server, call: str, done: str) -> None:
    for tag in "ab":
        put(ledger_of(root), tag)
    s3.faults.append(Fault("PUT", f"/{LEDGER_NAME}", "before503", 100))
    with pytest.raises(UnknownOutcomeError, match=f"did not answer whether it has {done} this tag") as caught:
        getattr(xla_ckpt.Checkpoints(root), call)("a")
    assert (caught.value.tag, caught.value.path) == ("a", root)
    s3.faults.clear()
    getattr(xla_ckpt.Checkpoints(root), call)("a")
    assert xla_ckpt.list_tags(root) == (["a", "b"] if call == "pin" else ["b"])


def test_a_refusal_after_a_lost_answer_does_not_hide_that_it_was_done(root: str, s3: S3Server) -> None:
    """As where credentials expire just then."""
    ledger = ledger_of(root)
    transaction = begin(ledger, "a", "new")
    s3.faults.append(Fault("PUT", f"/{LEDGER_NAME}", "drop", 1))
    s3.faults.append(Fault("PUT", f"/{LEDGER_NAME}", "refuse403", 100))
    transaction.commit()
    s3.faults.clear()
    assert text_of(ledger, "a") == "new"
    transaction.abort()
