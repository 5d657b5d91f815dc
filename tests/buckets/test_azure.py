"""``az://``, against Azurite, Microsoft's own emulator: ``npm install --prefix .azurite azurite@3.37.0`` brings it."""

from __future__ import annotations

import base64
import datetime
import email.utils
import hashlib
import hmac
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

import xla_ckpt
from xla_ckpt.errors import StorageError
from xla_ckpt.storage.remote_client import get_client

AZURITE = Path(__file__).parents[2] / ".azurite/node_modules/.bin/azurite-blob"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that every Azurite has; Microsoft publishes its key."""

pytestmark = pytest.mark.skipif(not AZURITE.exists(), reason="Azurite is not there: see the head of this file")


@pytest.fixture
def container(tmp_path: Path, use_store: Callable[[Mapping[str, str]], None]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    words = ["--silent", "--location", str(tmp_path), "--blobPort", str(port), "--skipApiVersionCheck"]
    server = subprocess.Popen([str(AZURITE), *words])
    try:
        settings = {"ACCOUNT_NAME": ACCOUNT, "ACCOUNT_KEY": KEY, "ENDPOINT": endpoint}
        named = {f"AZURE_STORAGE_{name}": value for name, value in settings.items()}
        use_store({**named, "AZURE_ALLOW_HTTP": "true"})
        name = f"box-{uuid.uuid4().hex[:8]}"
        while not made(endpoint, name):
            assert server.poll() is None, "Azurite has ended"
        yield f"az://{name}/run"
    finally:
        server.kill()  # it waits for open connections, if it is asked to end
        server.wait()


def made(endpoint: str, name: str) -> bool:
    """Make a container, which obstore cannot; False if nobody listens yet."""
    date, version = email.utils.formatdate(usegmt=True), "2021-08-06"
    facts = f"x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signature = hmac.new(base64.b64decode(KEY), f"PUT{chr(10) * 12}{facts}".encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}",
        "Content-Length": "0",
    }
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT", headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            return bool(answer.status == 201)
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError:
        return False


def test_saves_and_loads(container: str) -> None:
    state = {"w": torch.arange(10_000_000, dtype=torch.float32), "v": torch.ones(3)}
    for tag in "abcd":
        xla_ckpt.save(container, tag, state, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(container) == ["d"]
    tree = xla_ckpt.restore(container).tree
    assert torch.equal(tree["w"], state["w"])
    assert torch.equal(tree["v"], state["v"])
    assert xla_ckpt.verify(container).ok


def signature(rights: str, days: int) -> str:
    """A signature for shared access, made as Microsoft's documentation of account SAS says."""
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    end, version, kinds = until.strftime("%Y-%m-%dT%H:%M:%SZ"), "2021-08-06", "https,http"
    facts = "\n".join((ACCOUNT, rights, "b", "sco", "", end, "", kinds, version, "", ""))
    signed = base64.b64encode(hmac.new(base64.b64decode(KEY), facts.encode(), hashlib.sha256).digest()).decode()
    parts = {"sv": version, "ss": "b", "srt": "sco", "sp": rights, "se": end, "spr": kinds, "sig": signed}
    return urllib.parse.urlencode(parts)


def test_a_signature_for_shared_access(container: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", signature("rwdlac", 1))
    xla_ckpt.save(container, "a", {"w": torch.ones(3)})
    xla_ckpt.finalize_checkpoint()
    for token, told in (
        (signature("rl", 1), "no permission to write there"),
        (signature("rwdlac", -1), "the credentials are refused: they are wrong, have expired"),
    ):
        get_client.cache_clear()
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", token)
        with pytest.raises(StorageError, match=told):
            xla_ckpt.save(container, "b", {"w": torch.ones(3)})
    get_client.cache_clear()
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", signature("rl", 1))
    assert torch.equal(xla_ckpt.restore(container).tree["w"], torch.ones(3))


def test_a_wrong_key(container: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"wrong").decode())
    with pytest.raises(StorageError, match="the credentials are refused: they are wrong"):
        xla_ckpt.list_tags(container)
