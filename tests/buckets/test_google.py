"""``gs://``, against a small server that answers as Google's documentation says. The real one is not verified."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

import xla_ckpt
from tests.buckets.gcs_server import GcsServer, Thing
from tests.formats import orbax_saves
from tests.formats.test_orbax import assert_equal
from xla_ckpt.errors import UsageError
from xla_ckpt.storage.base import VersionConflict
from xla_ckpt.storage.resolve import open_store
from xla_ckpt.tags.lease import LEASES


@pytest.fixture
def gcs(use_store: Callable[[Mapping[str, str]], None]) -> Iterator[GcsServer]:
    server = GcsServer()
    use_store(server.environment)
    yield server
    xla_ckpt.finalize_checkpoint()  # what a save does after its commit would wait for a server that is gone
    LEASES.release_all()  # likewise
    server.close()


def test_saves_and_loads(gcs: GcsServer) -> None:
    root = "gs://bucket/run"
    state = {"w": torch.arange(10_000_000, dtype=torch.float32), "v": torch.ones(3)}
    for tag in "abc":
        xla_ckpt.save(root, tag, state, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(root) == ["c"]
    tree = xla_ckpt.restore(root).tree
    assert torch.equal(tree["w"], state["w"])
    assert torch.equal(tree["v"], state["v"])
    assert xla_ckpt.verify(root).ok
    xla_ckpt.save(root, "d", state, num_kept_ckpts=1)
    xla_ckpt.save(root, "e", state, num_kept_ckpts=1)
    assert not [key for key in gcs.objects if key.startswith("run/a/")], "a retired tag is swept"


def test_a_generation_decides(gcs: GcsServer) -> None:
    store = open_store("gs://bucket/run").object_store
    assert store is not None
    store.check_conditional_writes()
    store.write_record("r", b"1", None)
    assert store.read_record("r") is not None
    data, version = store.read_record("r") or (b"", "")
    store.write_record("r", b"2", version)
    for stale in (None, version):
        with pytest.raises(VersionConflict):
            store.write_record("r", b"3", stale)
    assert (store.read_record("r") or (b"", ""))[0] == b"2"
    assert data == b"1"


@pytest.fixture(scope="module")
def by_orbax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all checkpoints of `orbax_saves`."""
    folder = tmp_path_factory.mktemp("orbax")
    orbax_saves.save_all(folder)
    return folder


@pytest.mark.parametrize("name", ["manager/12", "pytree-files", "v1"])
def test_what_orbax_wrote_is_read_where_it_lies(gcs: GcsServer, by_orbax: Path, tmp_path: Path, name: str) -> None:
    for number, file in enumerate(sorted(path for path in (by_orbax / name).rglob("*") if path.is_file()), 1):
        gcs.objects[f"run/7/{file.relative_to(by_orbax / name)}"] = Thing(file.read_bytes(), number)
    assert xla_ckpt.list_tags("gs://bucket/run") == ["7"]
    # tensorstore looks at the environment once in a process.
    address = {"GOOGLE_BASE_URL": gcs.url, "TENSORSTORE_GCS_HTTP_URL": gcs.url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "its"}
    command = [sys.executable, "-m", "xla_ckpt", "convert", "gs://bucket/run", str(tmp_path / "run"), "--to", "native"]
    done = subprocess.run(command, env={**os.environ, **address}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_equal(xla_ckpt.restore(tmp_path / "run").tree, orbax_saves.tree())
    assert "Bearer its" in gcs.authorizations


def test_tensorstore_is_told_of_the_same_server(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    gcs.objects["run/7/_METADATA"] = Thing(b"{}", 1)
    monkeypatch.setenv("GOOGLE_BASE_URL", gcs.url)
    with pytest.raises(UsageError, match="TENSORSTORE_GCS_HTTP_URL=''"):
        xla_ckpt.restore("gs://bucket/run")


KEY = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def account(name: str) -> str:
    """The text of a made-up service account's file."""
    return json.dumps({"type": "service_account", "client_email": name, "private_key": KEY, "private_key_id": "1"})


@pytest.fixture
def signed(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> GcsServer:
    """The server, which is named by the environment, and no credentials."""
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
    monkeypatch.setenv("GOOGLE_BASE_URL", gcs.url)
    return gcs


def signers(gcs: GcsServer) -> set[str]:
    """Who signed the requests of a save and a load."""
    xla_ckpt.save("gs://bucket/run", "a", {"w": torch.ones(3)})
    assert torch.equal(xla_ckpt.restore("gs://bucket/run").tree["w"], torch.ones(3))
    parts = [header.removeprefix("Bearer ").split(".") for header in gcs.authorizations]
    return {
        json.loads(base64.urlsafe_b64decode(f"{part[1]}=="))["iss"] if len(part) == 3 else part[0] for part in parts
    }


@pytest.mark.parametrize("variable", ["GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT"])
def test_a_file_of_a_service_account(
    signed: GcsServer, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "its.json").write_text(account("of the file"))
    monkeypatch.setenv(variable, str(tmp_path / "its.json"))
    assert signers(signed) == {"of the file"}


def test_the_text_of_a_service_account_goes_before_the_credentials_of_the_application(
    signed: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "its.json").write_text(account("of the file"))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "its.json"))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", account("of the text"))
    assert signers(signed) == {"of the text"}


def test_credentials_of_gcloud(signed: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / ".config/gcloud/application_default_credentials.json"
    file.parent.mkdir(parents=True)
    file.write_text(account("of gcloud"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert signers(signed) == {"of gcloud"}


def test_a_token(signed: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "its")
    assert signers(signed) == {"its"}


@pytest.mark.parametrize(
    ("text", "told"), [("", "Unable to decode"), ('{"type": "external_account"}', "unknown variant `external_account`")]
)
def test_files_that_are_none_of_a_service_account(
    signed: GcsServer, text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "its.json").write_text(text)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "its.json"))
    with pytest.raises(UsageError, match=f"the settings for gs:// .*{told}.*docs/object-stores.md"):
        xla_ckpt.list_tags("gs://bucket/run")
