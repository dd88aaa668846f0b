"""One seam over local disk, fsspec's memory and a real S3 API server: the same promises on each."""

from __future__ import annotations

import errno
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.storage import Entry, RemoteStorage, Storage, open_storage, poll


@pytest.fixture(params=["local", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path / "checkpoints"))
    if request.param == "s3":
        return open_storage(request.getfixturevalue("s3") + "/run 1")
    memory = fsspec.filesystem("memory")
    for path in memory.ls("/", detail=False):
        memory.rm(path, recursive=True)
    return open_storage("memory://bucket/run 1")


def names(storage: Storage, child: str = "") -> list[tuple[str, bool, int]]:
    return sorted((entry.name, entry.is_dir, 0 if entry.is_dir else entry.size) for entry in storage.entries(child))


@pytest.mark.seam("s3")
def test_what_is_put_is_listed_and_read(storage: Storage) -> None:
    assert storage.stat("step_1/deep") is None
    storage.put("a.pt", b"12345")
    storage.put("step_1/deep/er.bin", b"678")
    assert names(storage) == [("a.pt", False, 5), ("step_1", True, 0)]
    assert names(storage, "step_1/deep") == [("er.bin", False, 3)]
    assert storage.read("step_1/deep/er.bin") == b"678"
    found, above = storage.stat("step_1/deep/er.bin"), storage.stat("step_1")
    assert (found.is_dir, found.size, found.path, above.is_dir) == (False, 3, storage.path("step_1/deep/er.bin"), True)
    assert storage.stat("a.pt/b") is None
    with fsspec.open(storage.path("a.pt")) as file:  # what a worker opens
        assert file.read() == b"12345"
    storage.put("a.pt", b"")
    assert storage.read("a.pt") == b""
    (listed,) = (entry for entry in storage.entries() if entry.name == "a.pt")
    assert (listed.path, listed.mtime is None) == (storage.path("a.pt"), False)


@pytest.mark.seam("s3")
def test_reading_what_is_not_there(storage: Storage) -> None:
    storage.put("there", b"1")
    for call in (storage.read, storage.remove, storage.remove_tree):
        with pytest.raises(FileNotFoundError):
            call("nothing")


@pytest.mark.seam("s3")
def test_of_all_who_create_a_name_one_succeeds(storage: Storage) -> None:
    ready = threading.Barrier(8)

    def creates(number: int) -> bool:
        try:
            storage.create(".elastic_ext/generation-1", b"%d" % number)
        except FileExistsError:
            return False
        return True

    if "memory" in storage.address:  # checks and writes in two steps, and has one process only to serve
        created = [creates(number) for number in range(8)]
    else:
        with ThreadPoolExecutor(8) as pool:
            created = list(pool.map(lambda number: (ready.wait(), creates(number))[1], range(8)))
    assert created.count(True) == 1
    assert storage.read(".elastic_ext/generation-1") == b"%d" % created.index(True)
    assert names(storage, ".elastic_ext") == [("generation-1", False, 1)]


@pytest.mark.full("s3")
@pytest.mark.filterwarnings("error")  # of what a file does when it is collected
def test_a_write_that_fails_leaves_what_was_there(storage: Storage) -> None:
    storage.put("a", b"old")
    for name in ("a", "b"):
        with pytest.raises(KeyboardInterrupt):
            _write_and_fail(storage, name)
    gc.collect()
    assert storage.read("a") == b"old"
    assert names(storage) == [("a", False, 3)]


def _write_and_fail(storage: Storage, name: str) -> None:
    with storage.write(name) as file:
        file.write(b"x" * (60 << 20))  # more than one part of an upload
        raise KeyboardInterrupt


@pytest.mark.full("s3")
def test_a_large_write_arrives_whole(storage: Storage) -> None:
    block = os.urandom(1 << 20)
    with storage.write("step_1/large") as file:
        for _ in range(60):
            file.write(block)
    with storage.open("step_1/large") as file:
        assert file.read(1 << 20) == block
        file.seek(59 << 20)
        assert file.read() == block
    with storage.write("step_1/nothing"):
        pass
    assert names(storage, "step_1") == [("large", False, 60 << 20), ("nothing", False, 0)]


@pytest.mark.full("s3")
def test_remove(storage: Storage) -> None:
    for name in ("step_1/manifest.json", "step_1/a/b", "step_1/c", "step_10/c", "x.pt"):
        storage.put(name, b"1")
    storage.remove("step_1/c")
    assert names(storage, "step_1") == [("a", True, 0), ("manifest.json", False, 1)]
    storage.remove_tree("step_1", first=("manifest.json", "not there"))
    storage.remove_tree("x.pt")
    assert names(storage) == [("step_10", True, 0)]


@pytest.mark.seam
def test_a_name_that_shows_up_late(storage: Storage) -> None:
    storage.put("step_1/a", b"1")
    looks: list[Entry | None] = []

    def look() -> Entry | None:
        looks.append(storage.stat("step_2/manifest.json"))
        if len(looks) == 2:
            storage.put("step_2/manifest.json", b"12")
        return looks[-1]

    assert poll(look, bool, time.monotonic()) is None
    assert poll(look, bool, time.monotonic() + 60).size == 2
    assert looks[:2] == [None, None]


def test_a_link_is_removed_but_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "a").write_bytes(b"1")
    (tmp_path / "latest").symlink_to("step_1")
    open_storage(str(tmp_path)).remove_tree("latest")
    assert (tmp_path / "step_1" / "a").exists()
    assert not os.path.lexists(tmp_path / "latest")


@pytest.mark.seam
def test_a_files_mode_is_that_of_the_umask(tmp_path: Path) -> None:
    code = (
        "import os, sys; from elastic_ext.checkpoints.storage import open_storage\n"
        "os.umask(0o027); storage = open_storage(sys.argv[1]); storage.put('d/a', b''); storage.create('d/b', b'')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert {oct((tmp_path / "d" / name).stat().st_mode & 0o777) for name in "ab"} == {"0o640"}


def test_what_is_written_outlasts_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is on the disk before it gets its name, and then the name is; so is that of a new directory."""
    synced: list[tuple[str, bool]] = []

    def sync(number: int) -> None:
        path = os.readlink(f"/proc/self/fd/{number}")
        synced.append((os.path.relpath(path, tmp_path) if os.path.isdir(path) else "a file", (tmp_path / "a" / "b").exists()))

    monkeypatch.setattr(os, "fsync", sync)
    open_storage(str(tmp_path)).put("a/b", b"data")
    assert synced == [(".", False), ("a file", False), ("a", True)]
    synced.clear()
    open_storage(str(tmp_path)).create("a/c", b"data")
    assert [path for path, _ in synced] == ["a file", "a"]


def test_a_filesystem_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: str, target: str) -> None:  # none such can be mounted by a test
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    storage = open_storage(str(tmp_path))
    storage.create("a", b"first")
    with pytest.raises(FileExistsError):
        storage.create("a", b"second")
    assert (storage.read("a"), os.listdir(tmp_path)) == (b"first", ["a"])


@pytest.mark.seam
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of a file stands for it: the same errno family, without a mount."""
    code = (
        "import resource, signal, sys; from elastic_ext.checkpoints.storage import open_storage\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: open_storage(sys.argv[1]).put('a', bytes(2000))\n"
        "except OSError as error: print(type(error).__name__, error.errno)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == f"OSError {errno.EFBIG}\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.seam
def test_a_server_without_an_answer_is_an_oserror(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore's own EndpointConnectionError is none."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refused
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        import s3fs

        filesystem = s3fs.S3FileSystem(
            endpoint_url=address, config_kwargs={"retries": {"max_attempts": 0}}, skip_instance_cache=True
        )
        filesystem.retries = 1
        storage = RemoteStorage(s3, filesystem, s3.removeprefix("s3://"))
        with pytest.raises(OSError, match="connect"):
            list(storage.entries())


def test_an_fsspec_that_may_overwrite_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda self, path, value, **kwargs: None)
    with pytest.raises(UsageError, match="too old"):
        open_storage("memory://bucket").create("a", b"")


@pytest.mark.full("s3")
def test_errors_of_the_reader_are_its_own(storage: Storage) -> None:
    storage.put("a", b"1")

    class OwnError(Exception):
        pass

    OwnError.__module__ = "elastic_ext.checkpoints.directory.own_files"
    with pytest.raises(OwnError), storage.open("a"):
        raise OwnError
