"""The process in which orbax commits: when it starts, and what becomes of a save when it does not, or is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import nursery
from tests.helper import children_of, come_to_its_end, helpers_of
from tests.nursery import Born, bear
from tests.runs import environment, names_in, run

BEGUN = """
    import os, signal, sys, threading
    import torch
    import xla_ckpt
    from tests.helper import helpers_of
    from xla_ckpt.storage.helper_process import HelperProcess
    from xla_ckpt.tags import orbax_commit

    orbax_commit.HelperProcess = HelperProcess
    tree, root = {"w": torch.ones(3)}, sys.argv[1]

    def put(tag, number=1, timeout=60, **keywords):
        options = xla_ckpt.SaveOptions(stale="ignore", timeout=timeout)
        return xla_ckpt.save(root, tag, {"w": torch.full((3,), float(number))}, options=options, **keywords)

    def held():
        return {tag: xla_ckpt.restore(root, tag).tree["w"][0].item() for tag in xla_ckpt.list_tags(root)}
"""


def program(code: str) -> str:
    return textwrap.dedent(BEGUN) + textwrap.dedent(code)


def begin(code: str, *args: object) -> Born:
    """Run a program in a fork of a process that has imported torch; its helper imports orbax, as everywhere."""
    return bear(nursery.Program(program(code), tuple(map(str, args))), live=True)


def run_forked(code: str, *args: object) -> None:
    process = begin(code, *args)
    said = process.communicate(120)
    assert process.returncode == 0, "\n".join(said)


def test_the_first_save_waits_for_it_and_a_later_one_does_not(tmp_path: Path) -> None:
    code = """
        xla_ckpt.save("memory://a", "a", tree)
        xla_ckpt.list_tags(root)
        assert not helpers_of(os.getpid())  # neither a look at tags nor another kind of store needs it
        environment = dict(os.environ)
        assert {"helper", "commit"} <= {*put("a").report.phases}
        helpers = helpers_of(os.getpid())
        assert "helper" not in put("b").report.phases
        assert helpers_of(os.getpid()) == helpers and len(helpers) == 1
        assert not {"jax", "orbax"} & {*sys.modules} and dict(os.environ) == environment
    """
    assert run(program(code), tmp_path, env={"JAX_PLATFORMS": "tpu", "XLA_FLAGS": "--no_such_flag=1"}).stderr == ""


def test_a_look_that_finds_no_tag_or_a_load_starts_it(tmp_path: Path) -> None:
    code = """
        from xla_ckpt.tags.orbax_commit import ORBAX_COMMITTER

        assert not xla_ckpt.has_checkpoint(root) and helpers_of(os.getpid())
        ORBAX_COMMITTER.wait_ready(60)
        assert "helper" not in put("a").report.phases
    """
    run(program(code), tmp_path)
    code = """
        import os, sys
        import xla_ckpt
        from tests.helper import helpers_of

        assert xla_ckpt.latest_tag(sys.argv[1]) == "a"
        assert "torch" not in sys.modules
        import torch
        assert xla_ckpt.latest_tag(sys.argv[1]) == "a" and xla_ckpt.has_checkpoint(sys.argv[1])
        assert not helpers_of(os.getpid())  # a load comes next, and has the processor for itself
        xla_ckpt.restore(sys.argv[1])
        assert helpers_of(os.getpid())
    """
    assert run(code, tmp_path).stderr == ""  # it ends while the process starts


def test_what_an_error_advises_shows_whether_it_starts() -> None:
    command = [sys.executable, "-m", "xla_ckpt.tags.orbax_process"]
    started = subprocess.run(command, stdin=subprocess.DEVNULL, env=environment(), capture_output=True, check=True)
    assert (started.stdout, started.stderr) == (b"This program starts: xla_ckpt can have it commit tags.\n", b"")


def test_only_rank_0_starts_it(tmp_path: Path) -> None:
    code = "assert xla_ckpt.latest_tag(root) is None and not helpers_of(os.getpid())"
    run(program(code), tmp_path, env={"RANK": "1", "WORLD_SIZE": "2"})


def test_a_save_in_flight_at_the_end_of_the_program_is_committed(tmp_path: Path) -> None:
    assert run(program("put('a', async_save=True)"), tmp_path).stderr == ""
    assert (tmp_path / "a" / "manifest.json").exists()


@pytest.mark.parametrize("why", ["no orbax", "no python"])
def test_a_process_that_does_not_start_is_a_clear_error(why: str, tmp_path: Path) -> None:
    code = """
        python, path = sys.executable, list(sys.path)
        if sys.argv[2] == "no python":
            sys.executable = "/nowhere/python"
            expected = "/nowhere/python: No such file or directory"
        else:
            sys.path.insert(0, sys.argv[3])
            expected = "ImportError: there is no orbax"
        assert not xla_ckpt.has_checkpoint(root)
        for _ in range(2):
            try:
                put("a")
            except xla_ckpt.SaveError as error:
                assert expected in str(error) and "-m xla_ckpt.tags.orbax_process" in str(error), error
            else:
                raise AssertionError("it saved")
            assert os.listdir(root) == [".lease"]
        sys.executable, sys.path = python, path
        assert put("a").result().sequence == 1
    """
    (tmp_path / "broken/orbax").mkdir(parents=True)
    (tmp_path / "broken/orbax/__init__.py").write_text("raise ImportError('there is no orbax')")
    run_forked(code, tmp_path / "root", why, tmp_path / "broken")


KILLED = """
    import os, signal, socket
    from xla_ckpt.storage.local import LocalStore
    from xla_ckpt.tags import orbax_process

    step, once = open(file).read().split()
    if once == "once":
        open(file, "w").write("never once")

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def dies_after(function):
        return lambda *args: (function(*args), die())

    if step == "starting":
        die()
    elif step == "waiting":
        orbax_process.receive_requests = die
    elif step == "reading":
        jobs = orbax_process.receive_requests
        orbax_process.receive_requests = lambda channel: map(die, jobs(channel))
    elif step == "finalized":
        orbax_process.replace_directory = die
    elif step == "set-aside":
        LocalStore.exchange = lambda *_: False
        LocalStore.rename = dies_after(LocalStore.rename)
    elif step == "exchanged":
        LocalStore.exchange = dies_after(LocalStore.exchange)
        LocalStore.rename = dies_after(LocalStore.rename)
    elif step == "placed":
        orbax_process.replace_directory = dies_after(orbax_process.replace_directory)
"""
"""What the process does first: it is killed at a step of its first job."""

COMMITTED = {"set-aside", "exchanged", "placed"}
"""Steps after which the tag is there when two were killed, although nobody has said so."""


@pytest.mark.parametrize("step", ["starting", "waiting", "reading", "finalized", "set-aside", "exchanged", "placed"])
def test_it_is_killed(step: str, tmp_path: Path) -> None:
    """Once: the save does not notice. Again and again: what the save says is so, and the tag is whole."""
    code = """
        from tests.helper import InFork

        file, killed, step, committed = sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5] == "True"

        class Killed(InFork):  # a process that imports orbax anew would take a second, nine times
            first = staticmethod(lambda: exec(killed, {"file": file}))

        orbax_commit.HelperProcess = Killed
        expected, number = {}, 0
        for tag in ("a", "b", "a"):
            number += 1
            open(file, "w").write(f"{step} once")
            orbax_commit.ORBAX_COMMITTER._stop_processes()
            expected[tag] = number
            assert put(tag, number).result().tag == tag
            assert open(file).read().split()[0] == "never" and held() == expected, (held(), expected)
        open(file, "w").write(f"{step} always")
        orbax_commit.ORBAX_COMMITTER._stop_processes()
        try:
            put("a", 9)
        except xla_ckpt.SaveError as error:
            assert not committed and "it ended with exit code -9" in str(error), error
        else:
            assert committed
            expected["a"] = 9
        assert held() == expected
        open(file, "w").write("never once")
        put("c", 10, num_kept_ckpts=2)
        xla_ckpt.finalize_checkpoint()
        assert len(held()) == 2
    """
    run_forked(code, tmp_path / "root", tmp_path / "step", textwrap.dedent(KILLED), step, step in COMMITTED)
    assert "c" in names_in(tmp_path / "root")
    assert not [name for name in names_in(tmp_path / "root") if name.startswith(".")]


def test_one_that_is_stopped_is_killed_before_the_save_fails(tmp_path: Path) -> None:
    code = """
        put("a", 1)
        (helper,) = helpers_of(os.getpid())
        os.kill(helper, signal.SIGSTOP)
        try:
            put("a", 2, timeout=2)
        except xla_ckpt.SaveError as error:
            assert "it did not answer in time, and was killed" in str(error), error
        else:
            raise AssertionError("it saved")
        assert not os.path.exists(f"/proc/{helper}") and held() == {"a": 1}
        put("a", 3)
        assert held() == {"a": 3}
    """
    run_forked(code, tmp_path)


def test_signals_of_a_scheduler_or_a_terminal_do_not_end_it(tmp_path: Path) -> None:
    code = """
        put("a", 1)
        (helper,) = helpers_of(os.getpid())
        assert os.getpgid(helper) != os.getpgid(0) and os.getsid(helper) != os.getsid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(helper, number)
        put("a", 2)
        assert helpers_of(os.getpid()) == [helper] and held() == {"a": 2}
    """
    run_forked(code, tmp_path)


def test_it_ends_when_the_program_is_killed_although_a_forked_process_lives_on(tmp_path: Path) -> None:
    code = """
        put("a", 1)
        if os.fork() == 0:
            signal.pause()
        print("forked", flush=True)
        signal.pause()
    """
    trainer = begin(code, tmp_path)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "forked\n"
    (helper,), (child,) = helpers_of(trainer.pid), children_of(trainer.pid)
    trainer.kill()
    try:
        come_to_its_end(helper)
    finally:
        os.kill(child, signal.SIGKILL)
        trainer.communicate(60)


def test_a_forked_child_has_a_process_of_its_own_and_both_go_on(tmp_path: Path) -> None:
    code = """
        put("a", 1)
        helpers = helpers_of(os.getpid())
        child = os.fork()
        if child == 0:
            put("b", 2)
            assert len(helpers_of(os.getpid())) == 1 and helpers_of(os.getpid()) != helpers
            sys.exit(7)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 7, code
        put("c", 3)
        assert helpers_of(os.getpid()) == helpers and held() == {"a": 1, "b": 2, "c": 3}
    """
    run_forked(code, tmp_path)


def test_saves_of_several_threads_to_several_directories(tmp_path: Path) -> None:
    code = """
        errors = []

        def saves(which):
            try:
                for number in range(5):
                    xla_ckpt.save(f"{root}/{which}", str(number), {"w": torch.full((3,), float(number))})
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=saves, args=(which,)) for which in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == [] and len(helpers_of(os.getpid())) == 1
        assert all(xla_ckpt.list_tags(f"{root}/{which}") == ["0", "1", "2", "3", "4"] for which in range(4))
    """
    run_forked(code, tmp_path)


STOPPED = """
    import signal, threading
    from xla_ckpt.tags import directory_operations

    replace_directory = directory_operations.replace_directory

    def stops(*args):
        # To this thread: sent to the process, it may take effect only when this thread has gone on for a while.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return replace_directory(*args)

    directory_operations.replace_directory = stops
"""


def test_a_job_that_starts_again_leaves_a_commit_alone_that_outlives_its_program(tmp_path: Path) -> None:
    """The process has the draft's lock, too: else its files would go while it gives it the tag's name."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path/sitecustomize.py").write_text(textwrap.dedent(STOPPED))
    root = tmp_path / "root"
    trainer = begin("sys.path.insert(0, sys.argv[2]); put('a', 1)", root, tmp_path / "path")
    while not (helpers := helpers_of(trainer.pid)) or "(stopped)" not in Path(f"/proc/{helpers[0]}/status").read_text():
        assert not trainer.has_ended()
    trainer.kill()
    trainer.communicate(60)
    run_forked("put('b', 2); xla_ckpt.finalize_checkpoint(); assert held() == {'b': 2}, held()", root)
    assert names_in(root) == [".new-a", "b"]
    os.kill(helpers[0], signal.SIGCONT)
    come_to_its_end(helpers[0])
    run_forked(
        "assert held() == {'a': 1, 'b': 2}, (held(), os.listdir(root)); assert xla_ckpt.verify(root, 'a').ok", root
    )
