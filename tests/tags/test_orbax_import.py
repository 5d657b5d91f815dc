"""orbax's import in the background: when it begins, who waits for it, and programs that end, fork or import meanwhile.

A new interpreter runs each program, since the processes of the nursery have imported orbax before.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.runs import run, start

BEGUN = textwrap.dedent("""
    import sys, threading
    import torch
    import xla_ckpt

    def importing():
        return any(thread.name == "xla_ckpt-import" for thread in threading.enumerate())

    def come_to(module):  # the import goes on meanwhile
        while module not in sys.modules and importing():
            threading.Event().wait(0.001)

    root = sys.argv[1]
    assert not xla_ckpt.has_checkpoint(root)
""")


def test_the_first_save_waits_for_the_import_and_a_later_one_does_not(tmp_path: Path) -> None:
    code = """
        import sys
        import torch
        import xla_ckpt

        tree, root = {"w": torch.ones(3)}, sys.argv[1]
        xla_ckpt.save("memory://a", "a", tree)
        xla_ckpt.list_tags(root)
        assert "jax" not in sys.modules  # neither a look at tags nor another kind of store needs it
        first = xla_ckpt.save(root, "a", tree, async_save=True, trace=sys.argv[2])
        assert {"import", "commit"} <= {*first.result().phases}
        assert "import" not in xla_ckpt.save(root, "b", tree).report.phases
    """
    run(code, tmp_path / "r", tmp_path / "trace.json")
    bars = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (imported,) = [e for e in bars if e["name"] == "import orbax"]
    (waited,) = [e for e in bars if e["name"] == "import"]
    assert imported["tid"] != waited["tid"]
    assert imported["ts"] + imported["dur"] <= waited["ts"] + waited["dur"]


def test_a_look_for_the_newest_tag_or_a_load_begins_it(tmp_path: Path) -> None:
    code = """
        from xla_ckpt.tags.orbax_import import ORBAX

        assert importing()
        while importing():
            threading.Event().wait(0.01)
        assert "orbax.checkpoint" in sys.modules
        assert "import" not in xla_ckpt.save(root, "a", {"w": torch.ones(3)}).report.phases
    """
    run(BEGUN + textwrap.dedent(code), tmp_path)
    code = """
        import sys, threading
        import xla_ckpt

        assert xla_ckpt.latest_tag(sys.argv[1]) == "a"
        assert "torch" not in sys.modules and threading.active_count() == 1  # a program that trains nothing
        xla_ckpt.restore(sys.argv[1])
        assert any(thread.name == "xla_ckpt-import" for thread in threading.enumerate())
    """
    run(code, tmp_path)


def test_only_rank_0_imports_it(tmp_path: Path) -> None:
    code = BEGUN + "assert not importing() and xla_ckpt.latest_tag(root) is None and 'jax' not in sys.modules"
    run(code, tmp_path, env={"RANK": "1", "WORLD_SIZE": "2"})


@pytest.mark.xla
def test_it_waits_until_torch_xla_has_opened_its_devices(tmp_path: Path) -> None:
    """jax sets the environment of libtpu, which reads it when devices are opened."""
    code = """
        assert not importing() and "jax" not in sys.modules
        torch.ones(2, device="xla")
        assert xla_ckpt.latest_tag(root) is None and importing()
    """
    run(BEGUN.replace("import torch", "import torch, torch_xla") + textwrap.dedent(code), tmp_path)


def test_a_program_that_ends_meanwhile_ends_cleanly(tmp_path: Path) -> None:
    """At several places of the import, libraries among them."""
    places = ("xla_ckpt", "jax._src.lax", "tensorstore")
    programs = [start(f"{BEGUN}come_to({place!r})", tmp_path) for place in places]
    for program in programs:
        assert program.communicate(timeout=120) == ("", "")
        assert program.returncode == 0


def test_a_save_in_flight_at_the_end_of_the_program_gets_its_import(tmp_path: Path) -> None:
    code = BEGUN + "come_to('jax'); xla_ckpt.save(root, 'a', {'w': torch.ones(3)}, async_save=True)"
    assert run(code, tmp_path).stderr == ""
    assert (tmp_path / "a" / "manifest.json").exists()


def test_a_fork_meanwhile_leaves_a_child_that_can_import(tmp_path: Path) -> None:
    code = """
        import os
        come_to("jax._src.lax")
        child = os.fork()
        if child == 0:
            import jax.numpy, orbax.checkpoint
            xla_ckpt.save(root, "a", {"w": torch.ones(3)})
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert xla_ckpt.list_tags(root) == ["a"]
    """
    run(BEGUN + textwrap.dedent(code), tmp_path)


def test_other_threads_import_the_same_at_the_same_time(tmp_path: Path) -> None:
    code = """
        names = ("jax.numpy", "orbax.checkpoint", "tensorstore", "orbax.checkpoint.path", "jax.experimental.pallas")
        found = []

        def imports(name):
            exec(f"import {name}")
            found.append(name)

        threads = [threading.Thread(target=imports, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        handle = xla_ckpt.save(root, "a", {"w": torch.ones(3)}, async_save=True)
        for thread in threads:
            thread.join()
        assert len(found) == len(names) and handle.result().sequence == 1
    """
    run(BEGUN + textwrap.dedent(code), tmp_path)


def test_an_error_of_the_import_is_raised_by_the_save_that_needs_it(tmp_path: Path) -> None:
    code = """
        import sys
        sys.modules["orbax"] = None  # as if it were not installed
        import torch
        import xla_ckpt

        tree, root = {"w": torch.ones(3)}, sys.argv[1]
        assert not xla_ckpt.has_checkpoint(root)
        for _ in range(2):
            try:
                xla_ckpt.save(root, "a", tree)
            except xla_ckpt.SaveError as error:
                assert "orbax" in str(error) and isinstance(error.__cause__, ImportError), error
            else:
                raise AssertionError("it saved without orbax")
        assert xla_ckpt.list_tags(root) == []
        del sys.modules["orbax"]
        assert xla_ckpt.save(root, "a", tree).result().sequence == 1
    """
    run(code, tmp_path)


def test_a_forked_child_ends_by_sys_exit(tmp_path: Path) -> None:
    """It hung for ever: jax's client, which orbax has opened, waited for threads that the child does not have."""
    code = """
        import os, sys, warnings
        import torch
        import xla_ckpt

        xla_ckpt.save(sys.argv[1], "a", {"w": torch.ones(2)})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jax warns of the fork
            child = os.fork()
        if not child:
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run(textwrap.dedent(code), str(tmp_path)).stdout.split()[-1] == "3"
