"""Writing results: checked early, whole or not at all (cases C17 and C25)."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from accel.errors import OutputError
from pipelines.output_folder import OutputFolder

ROOT = Path(__file__).parents[2]
OLD = b"the older good result"


def claim(path: Path) -> OutputFolder:
    return OutputFolder.claim(path, result_name="result.json")


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fail(number: int):
    def fsync(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    return fsync


def test_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/out.*can't be written to"):
        claim(tmp_path / "file" / "out")


def test_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(OutputError, match="can't be written to"):
        claim(tmp_path / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(OutputError, match="Permission denied"):
        claim(tmp_path)


def test_read_only_file_system_is_refused_and_left_clean(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "fsync", fail(errno.EROFS))
    with pytest.raises(OutputError, match="Read-only file system"):
        claim(tmp_path)
    assert names(tmp_path) == []


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with claim(tmp_path), pytest.raises(OutputError, match="in use by another run"):
        claim(tmp_path)
    claim(tmp_path).close()
    assert names(tmp_path) == []


def test_claim_of_a_killed_process_is_free_again(tmp_path: Path) -> None:
    child = python(
        """
        import os, sys
        from pathlib import Path
        from pipelines.output_folder import OutputFolder
        folder = OutputFolder.claim(Path(sys.argv[1]), result_name="result.json")
        os.kill(os.getpid(), 9)
        """,
        str(tmp_path),
    )
    child.communicate(timeout=60)
    claim(tmp_path).close()


def test_finished_result_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_bytes(OLD)
    with pytest.raises(OutputError, match="already holds a result"):
        claim(tmp_path)
    (tmp_path / "result.json").unlink()
    claim(tmp_path).close()


@pytest.mark.parametrize("name", ["Ausgabe/été 猫 (1)", "a b/[c]$d", "x" * 200])
def test_odd_paths(tmp_path: Path, name: str) -> None:
    with claim(tmp_path / name) as folder:
        folder.write({"actions.json": b"{}", "ä" * 120 + ".bin": b"\0\1"})
    assert (tmp_path / name / "actions.json").read_bytes() == b"{}"
    assert len(names(tmp_path / name)) == 2


def test_file_size_limit_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "actions.npy").write_bytes(OLD)
    child = python(
        """
        import resource, sys
        from pathlib import Path
        from accel.errors import OutputError
        from pipelines.output_folder import OutputFolder
        folder = OutputFolder.claim(Path(sys.argv[1]), result_name="result.json")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            folder.write({"small.json": b"{}", "actions.npy": bytes(8192)})
        except OutputError as error:
            sys.exit(str(error))
        """,
        str(tmp_path),
    )
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "File too large" in errors
    assert (tmp_path / "actions.npy").read_bytes() == OLD
    assert names(tmp_path) == ["actions.npy"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_full_disk_changes_nothing(tmp_path: Path, monkeypatch, number: int) -> None:
    (tmp_path / "canvas.png").write_bytes(OLD)
    with claim(tmp_path) as folder:
        monkeypatch.setattr(os, "fsync", fail(number))
        with pytest.raises(OutputError, match=os.strerror(number)):
            folder.write({"canvas.png": b"new", "other": b"new"})
    assert (tmp_path / "canvas.png").read_bytes() == OLD
    assert names(tmp_path) == ["canvas.png"]


def test_a_folder_in_the_place_of_a_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "actions.npy").write_bytes(OLD)
    (tmp_path / "result.json").mkdir()
    with pytest.raises(OutputError, match=r"'result\.json' is a folder.*Written: none; .* unchanged"):
        OutputFolder(tmp_path, None).write({"actions.npy": b"new", "result.json": b"{}"})
    assert (tmp_path / "actions.npy").read_bytes() == OLD
    assert names(tmp_path) == ["actions.npy", "result.json"]


def test_a_failure_midway_says_what_is_written(tmp_path: Path, monkeypatch) -> None:
    replace = os.replace

    def fail_at_second(source: Path, target: Path) -> None:
        if target.name == "result.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_at_second)
    with pytest.raises(OutputError, match=r"Written: actions\.npy\.") as caught:
        OutputFolder(tmp_path, None).write({"actions.npy": b"new", "result.json": b"{}"})
    assert "unchanged" not in str(caught.value)
    assert names(tmp_path) == ["actions.npy"]


def test_ctrl_c_while_writing_changes_nothing(tmp_path: Path, monkeypatch) -> None:
    def interrupt(_descriptor: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "canvas.png").write_bytes(OLD)
    with claim(tmp_path) as folder:
        monkeypatch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            folder.write({"canvas.png": b"new"})
    assert (tmp_path / "canvas.png").read_bytes() == OLD
    assert names(tmp_path) == ["canvas.png"]


@pytest.mark.usefixtures("default_signals")
def test_sigterm_while_writing_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "actions.npy").write_bytes(OLD)
    child = python(
        """
        import os, sys, time
        from pathlib import Path
        from pipelines.output_folder import OutputFolder
        folder = OutputFolder.claim(Path(sys.argv[1]), result_name="result.json")
        def slow(descriptor):
            print("writing", flush=True)
            time.sleep(60)
        os.fsync = slow
        folder.write({"actions.npy": b"new"})
        """,
        str(tmp_path),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "actions.npy").read_bytes() == OLD
    assert names(tmp_path) == ["actions.npy"]


def test_two_writers_without_locks_never_mix(tmp_path: Path) -> None:
    contents = [bytes([fill]) * 1_000_000 for fill in (1, 2)]

    def write(data: bytes) -> None:
        for _ in range(5):
            OutputFolder(tmp_path, None).write({"actions.npy": data})

    writers = [threading.Thread(target=write, args=(data,)) for data in contents]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (tmp_path / "actions.npy").read_bytes() in contents
    assert names(tmp_path) == ["actions.npy"]
