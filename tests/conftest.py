"""Shared fixtures; how hard hypothesis looks (``--hypothesis-profile=thorough`` looks longer)."""

from __future__ import annotations

import gc
import os
import signal
import sys

os.environ.setdefault("PJRT_DEVICE", "CPU")
# Else each process that a test starts compiles this library anew, which takes longer than importing it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Most of the time of a small XLA test goes into compiling; what is saved and loaded does not depend on how it is done.
# Code for each fused operation, made in several modules at a time, takes four times as long as code for plain ones.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1",
)

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.helper import FromNursery, InThread
from tests.nursery import begin, end_all
from tests.slow import listed, mark
from xla_ckpt.storage.remote_client import get_client
from xla_ckpt.tags import orbax_commit
from xla_ckpt.tags.lease import LEASES

# A shell that starts the tests in the background has them ignore Ctrl-C, and each process that a test starts, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

sys.dont_write_bytecode = False  # what pytest makes of test modules takes a third of the time of collecting them
gc.disable()  # until all tests are collected: looking for garbage would take a seventh of that time

if TYPE_CHECKING:
    from tests.buckets.s3_server import S3Server

orbax_commit.HelperProcess = FromNursery  # type: ignore[misc]  # one that imports orbax anew would take two seconds

settings.register_profile("fast", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile("fast")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kill-instants", type=int, default=6, metavar="N", help="how many instants of a save are tried with kill -9"
    )
    parser.addoption("--rest", action="store_true", help="also the rest of each matrix, of which else some cases run")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark(items, listed())
    if not config.getoption("--rest"):
        rest = [item for item in items if item.get_closest_marker("rest")]
        items[:] = [item for item in items if not item.get_closest_marker("rest")]
        config.hook.pytest_deselected(items=rest)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kill_instant" in metafunc.fixturenames:
        instants = metafunc.config.getoption("--kill-instants")
        metafunc.parametrize("kill_instant", [number / instants for number in range(instants)], ids="{:.3f}".format)


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):  # one of several processes, which has a long time before it
        begin()  # else a test whose ranks wait a minute for each other would wait for imports in that minute


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was imported stays, and need not be looked at by each test that looks for garbage
    gc.enable()


@pytest.fixture
def commits_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """orbax commits within this process, where what a test puts in place of a function concerns it, too."""
    orbax_commit.ORBAX_COMMITTER._stop_processes()
    monkeypatch.setattr(orbax_commit, "HelperProcess", InThread)
    yield
    orbax_commit.ORBAX_COMMITTER._stop_processes()


@pytest.fixture(scope="session")
def server_of_all() -> Iterator[S3Server]:
    from tests.buckets.s3_server import S3Server  # which takes a second

    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def use_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Has the environment name a store, until the test ends."""

    def use(environment: Mapping[str, str]) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        get_client.cache_clear()

    yield use
    get_client.cache_clear()


@pytest.fixture
def s3(server_of_all: S3Server, use_store: Callable[[Mapping[str, str]], None]) -> Iterator[S3Server]:
    """A server that answers as S3 does, without faults, and with its credentials in the environment."""
    import xla_ckpt

    use_store(server_of_all.environment)
    server_of_all.forget()
    yield server_of_all
    server_of_all.forget()
    xla_ckpt.finalize_checkpoint()  # what saves do after their commit is not to meet the next test's faults
    LEASES.release_all()  # else they would be beaten while the next test counts its requests


@pytest.fixture(autouse=True)
def no_process_outlives_its_test() -> Iterator[None]:
    """One that a failed test left would be reported by another test, as an error of its own."""
    yield
    end_all()
