"""The server of `xla-ckpt view` answers the person who started it, and nobody else."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.cli.test_cli import call
from tests.nursery import Program, bear
from tests.pages import Parsed
from xla_ckpt.cli.view.server import CheckpointSite, ViewServer


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    xla_ckpt.save(path, "a&b", {"w": torch.ones(3)})
    return path


@pytest.fixture
def server(root: Path) -> Iterator[ViewServer]:
    with ViewServer(CheckpointSite(str(root))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: ViewServer, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, str]:
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_pages_come_with_a_policy_that_lets_nothing_run(server: ViewServer) -> None:
    answer, text = ask(server, f"/{server.token}/")
    Parsed(text).check_harmless()
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert (answer.status, answer.headers["Cache-Control"], answer.headers["Referrer-Policy"]) == (
        200, "no-store", "no-referrer",
    )  # fmt: skip
    link = next(a["href"] for a in Parsed(text).all("a") if "page=tag" in (a["href"] or ""))
    assert link == "?page=tag&tag=a%26b"
    assert "Tag a&b" in Parsed(ask(server, f"/{server.token}/{link}")[1]).texts


def test_who_does_not_know_the_address_gets_nothing(server: ViewServer, root: Path) -> None:
    good = f"/{server.token}/"
    assert ask(server, good, Host="localhost:8000")[0].status == 200  # through a tunnel of ssh
    for path, headers in (
        ("/", {}), (good[:-2] + "/", {}), (good + "../../etc/passwd", {}), ("/favicon.ico", {}), ("//", {}),
        (good, {"Host": "evil.example"}), (good, {"Host": f"evil.example:{server.server_address[1]}"}),
        (good, {"Host": ""}), (good, {"Host": "127.0.0.1.evil.example"}), (good, {"Host": "[::1"}),
    ):  # fmt: skip
        answer, text = ask(server, path, **headers)
        assert answer.status == 404, (path, headers)
        assert str(root) not in text
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert ask(server, good, method)[0].status == 501
    assert ask(server, good + "?" + "&".join(f"x{i}=1" for i in range(50)))[0].status == 400
    assert server.server_address[0] == "127.0.0.1"


def test_a_connection_that_says_nothing_stops_nobody(server: ViewServer) -> None:
    with socket.create_connection(("127.0.0.1", server.server_address[1])):
        assert ask(server, f"/{server.token}/")[0].status == 200


def test_the_command_prints_the_address_and_ends_with_ctrl_c(root: Path, tmp_path: Path) -> None:
    from xla_ckpt.__main__ import EXIT_INTERRUPTED

    program = Program(
        "import sys\nfrom xla_ckpt.__main__ import main\n"
        f"sys.argv = ['xla-ckpt', 'view', {str(root)!r}]\nsys.exit(main())\n",
        name="view.py",
    )
    born = bear(program, cwd=tmp_path, live=True)
    assert born.stdout is not None
    address = born.stdout.readline().strip()
    port, token = address.removeprefix("http://127.0.0.1:").strip("/").split("/")
    connection = HTTPConnection("127.0.0.1", int(port), timeout=30)
    connection.request("GET", f"/{token}/")
    assert "a&amp;b" in connection.getresponse().read().decode()
    born.send_signal(signal.SIGINT)
    born.communicate(30)
    assert born.returncode == EXIT_INTERRUPTED


def test_the_command_writes_one_file(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.html"
    code, out, err = call(capsys, "view", root, "--html", file, "--leaf", "w")
    assert (code, out.startswith(f"{file}: "), err) == (0, True, "")
    parsed = Parsed(file.read_text())
    parsed.check_harmless()
    assert {"Tag a&b", "All 3 values were read."} <= set(parsed.texts)
    code, _, err = call(capsys, "view", root, "--html", tmp_path / "nowhere" / "run.html")
    assert (code, "writing the page" in err) == (1, True)
    assert call(capsys, "view", root, "--mesh", "tp=2")[0] == 2
    code, _, err = call(capsys, "view", tmp_path / "nothing", "--html", file)
    assert (code, "Nothing lies there" in err) == (1, True)


def test_the_one_file_replaces_older_pages_alone(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.html"
    file.touch()  # as mktemp does
    for _ in range(2):
        assert call(capsys, "view", root, "--html", file)[0] == 0
    manifest = next((root / "a&b").glob("manifest*"))
    before = manifest.read_bytes()
    code, out, err = call(capsys, "view", root, "--html", manifest)
    assert (code, out, manifest.read_bytes()) == (2, "", before)
    assert "is no page that view wrote" in err


@pytest.mark.parametrize(
    ("option", "ends_with", "said"),
    [
        ("--against=stp_500", 1, "there is no such checkpoint [tag stp_500"),
        ("--mesh=tq=2", 2, "a mesh makes no sense"),
        ("--leaf=modle", 2, "no leaf is like this"),
    ],
)
def test_what_is_asked_for_in_one_file_and_is_not_there(
    root: Path, tmp_path: Path, option: str, ends_with: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.html"
    code, out, err = call(capsys, "view", root, "--html", file, option)
    assert (code, out, file.exists(), said in err) == (ends_with, "", False, True)
    (tmp_path / "empty").mkdir()
    code, _, err = call(capsys, "view", tmp_path / "empty", "--html", file, option)
    assert (code, file.exists(), "there is no checkpoint" in err) == (1, False, True)
