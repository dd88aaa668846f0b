"""The record of saves below a URL: what goes through fsspec."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.test_saves import KILLED, RecordedJob

HEAD = """
import os, signal, sys, fsspec, torch
import torch.distributed.checkpoint as dcp
url, kill = sys.argv[1], sys.argv[2:] == ["kill"]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
def step():
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
filesystem, root = fsspec.core.url_to_fs(url)
def file(name, data=b"data"):
    with filesystem.open(f"{root}/{name}", "wb") as opened:
        opened.write(data)
"""

WAYS: dict[str, str] = {
    "open": """
def save(number):
    file(f"step_{number}/model.bin")
    if kill and number == 3: os.kill(os.getpid(), signal.SIGKILL)
    file(f"step_{number}/state.json")
""",
    "fsspec.open": """
def save(number):
    for name in ("model.pt", "optimizer.pt"):
        with fsspec.open(f"{url}/step_{number}/{name}", "wb") as opened:
            torch.save({}, opened)
        if kill and number == 3: os.kill(os.getpid(), signal.SIGKILL)
""",
    "pipe, put": """
open("here", "wb").write(b"data")
def save(number):
    filesystem.pipe(f"{root}/step_{number}/model.bin", b"data")
    filesystem.pipe_file(f"{root}/step_{number}/more.bin", b"data")
    if kill and number == 3: os.kill(os.getpid(), signal.SIGKILL)
    filesystem.put("here", f"{root}/step_{number}/state.bin")
    filesystem.put_file("here", f"{root}/step_{number}/last.bin")
""",
    "copied into place": """
def save(number):
    file(f"step_{number}/.metadata.tmp")
    if kill and number == 3: os.kill(os.getpid(), signal.SIGKILL)
    filesystem.rename(f"{root}/step_{number}/.metadata.tmp", f"{root}/step_{number}/.metadata")
""",
    "dcp": """
def save(number):
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    if kill and number == 3: os.kill(os.getpid(), signal.SIGKILL)
    dcp.save(model.state_dict(), storage_writer=FsspecWriter(f"{url}/step_{number}"), no_dist=True)
""",
}

LOOP = """
step()
for number in (1, 2, 3):
    save(number)
    step()
filesystem.rm(f"{root}/step_1", recursive=True)
"""


def job_at(folder: Path, url: str) -> RecordedJob:
    return RecordedJob(folder, directories=[url])


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("killed", [True, False])
def test_each_way_to_save_to_s3(tmp_path: Path, s3: str, way: str, killed: bool) -> None:
    job = job_at(tmp_path, f"{s3}/run")
    (tmp_path / "script.py").write_text(HEAD + WAYS[way] + LOOP)
    job.run("script.py", f"{s3}/run", *(["kill"] if killed else []), code=KILLED if killed else 0)
    assert job.proved() == (["step_1", "step_2"] if killed else ["step_2", "step_3"])
    files = {path for each in job.record().saves if each.entry.path == "step_2" for path in each.files}
    assert len(files) == {"copied into place": 1, "pipe, put": 4}.get(way, 2), files


@pytest.mark.seam
def test_filesystems_without_a_loop(tmp_path: Path) -> None:
    """As those of sftp and SMB."""
    job = job_at(tmp_path, "memory://bucket/run")
    (tmp_path / "script.py").write_text(
        HEAD
        + """
file("old/a")
step()
for number in (1, 2):
    file(f"step_{number}/a")
    filesystem.copy(f"{root}/step_{number}/a", f"{root}/step_{number}/b")
    step()
filesystem.copy(f"{root}/step_1", f"{root}/copy", recursive=True)
step()
with filesystem.open(root + "2/step_9", "wb") as opened: opened.write(b"data")
file(".elastic_ext/saves/x")
with filesystem.open(f"{root}/step_2/a") as opened: opened.read()
"""
    )
    job.run("script.py", "memory://bucket/run")
    saves = {each.entry.path: each for each in job.record().saves}
    assert saves.keys() == {"old", "step_1", "step_2", "copy"}
    assert [name for name, each in saves.items() if each.proved] == ["old", "step_1", "step_2"]
    assert saves["copy"].why == "not all of it was seen to be written"
    assert sorted(saves["step_2"].files) == ["step_2/a", "step_2/b"]


# How the second file of a save is written again in place, after the first one was; and what the record says, "": it is proved.
SEEN = "not all of it was seen"
OPEN = "has neither ended nor begun another save"
FAILED = "what wrote it beside the training of rank 0 has failed"
AGAIN: dict[str, tuple[str, str]] = {
    "closed": ("file(optim)", ""),
    "text": ("with filesystem.open(path, 'w') as opened: opened.write('data')", ""),
    "closed twice": ("opened = filesystem.open(path, 'wb'); opened.close(); opened.close()", ""),
    "while handled": ("try: nothing\nexcept NameError: file(optim)", ""),
    "opened while handled": ("try: nothing\nexcept NameError: opened = filesystem.open(path, 'wb')\nopened.close()", ""),
    "cached": ("with fsspec.open(f'simplecache::{url}/{optim}', 'wb') as opened: opened.write(b'data')", ""),
    "after an iterator": (
        "file('other/y'); fsspec.AbstractFileSystem.rm(filesystem, iter([root + '/other/y'])); file(optim)",
        "",
    ),
    "raises within a cached one": (
        "try:\n  with fsspec.open(f'simplecache::{url}/{optim}', 'wb'): nothing\nexcept NameError: pass",
        FAILED,
    ),
    "dropped by an error": (
        "def save():\n  opened = filesystem.open(path, 'wb'); nothing\n"
        "filesystem._open = lambda *given, **_: spec.AbstractBufferedFile(filesystem, *given)\n"
        "try: save()\nexcept NameError: pass\ndel filesystem._open",
        FAILED,
    ),
    "exists": ("try: filesystem.open(path, 'xb')\nexcept FileExistsError: pass", FAILED),
    "copied from nothing": ("try: filesystem.copy(root + '/nothing', path)\nexcept FileNotFoundError: pass", FAILED),
    "moved from nothing": ("try: filesystem.mv(root + '/nothing', path)\nexcept FileNotFoundError: pass", FAILED),
    "not closed": ("opened = filesystem.open(path, 'wb'); kept.append(opened)", OPEN),
    "never closed": ("filesystem.open(path, 'wb').write(b'data')", OPEN),
    "raises within": ("try:\n  with filesystem.open(path, 'wb'): nothing\nexcept NameError: pass", FAILED),
    "thrown away": ("opened = filesystem.open(path, 'wb'); opened.discard(); opened.close()", FAILED),
    "was closed": ("opened = filesystem.open(path, 'wb'); io.BytesIO.close(opened); opened.close()", FAILED),
    "transaction": ("with filesystem.transaction: file(optim)", SEEN),
    "committed later": ("with filesystem.open(path, 'wb', autocommit=False) as opened: opened.write(b'data')", SEEN),
    "compressed": ("with filesystem.open(path, 'wb', compression='gzip') as opened: opened.write(b'data')", SEEN),
    "skips": ("filesystem.copy(root + '/nothing', path, on_error='ignore')", SEEN),
    "all below": ("filesystem.copy(root + '/old', path, True, None)", SEEN),
    "of C": ("filesystem._open = lambda *_, **__: io.BytesIO()\nfile(optim)\ndel filesystem._open", SEEN),
    "own close": (
        "made = filesystem.open(root + '/other/x', 'rb'); made.close = lambda: None\n"
        "filesystem._open = lambda *_, **__: made\nfile(optim)\ndel filesystem._open",
        SEEN,
    ),
    "fails to close": (
        "closes = memory.MemoryFile.close\ndef fails(file): raise OSError('full')\nmemory.MemoryFile.close = fails\n"
        "try: file(optim)\nexcept OSError: pass\nmemory.MemoryFile.close = closes",
        FAILED,
    ),
}


@pytest.mark.seam
def test_files_must_be_closed_well(tmp_path: Path) -> None:
    job = job_at(tmp_path, "memory://bucket/run")
    imports = "import io\nfrom fsspec import spec\nfrom fsspec.implementations import memory"
    parts = [HEAD, imports, "kept = []\nstep()\nfile('old/x'); file('other/x')"]
    for name, (text, _) in AGAIN.items():
        parts += [f"optim = {name!r} + '/optim'; path = f'{{root}}/{{optim}}'; file({name!r} + '/model'); file(optim); step()"]
        parts += [f"file({name!r} + '/model')", text, "step()"]
    (tmp_path / "script.py").write_text("\n".join(parts))
    job.run("script.py", "memory://bucket/run")
    last = {each.entry.path: each for each in job.record().saves}
    said = {name: "" if last[name].proved else last[name].why for name in AGAIN}
    assert {name: why in said[name] and bool(said[name]) == bool(why) for name, (_, why) in AGAIN.items()} == dict.fromkeys(
        AGAIN, True
    ), said


@pytest.mark.seam
def test_a_file_open_over_other_saves(tmp_path: Path) -> None:
    """Those are saves of their own, and not proved while it is open."""
    job = job_at(tmp_path, "memory://bucket/run")
    script = """
step()
file("last/model"); left = filesystem.open(f"{root}/last/optim", "wb")
step()
for _ in range(2):
    file("last/model"); file("last/optim")
    step()
left.close()
step()
file("last/model"); file("last/optim")
step()
"""
    (tmp_path / "script.py").write_text(HEAD + script)
    job.run("script.py", "memory://bucket/run")
    assert [(each.count, each.proved) for each in job.record().saves if not each.gone] == [(5, True)]
    numbers = [each.who for journal in job.journals for each in journal.events if each.kind == "e"]
    assert len(numbers) == len(set(numbers)) == 8


FAILS_ON_S3: dict[str, str] = {
    "close": "s3fs.core.S3File._upload_chunk = fails\n    with filesystem.open(path, 'wb') as opened: opened.write(b'data')",
    "pipe": "s3fs.S3FileSystem._call_s3 = fails\n    filesystem.pipe(path, b'data')",
    "put": "s3fs.S3FileSystem._call_s3 = fails\n    filesystem.put('here', path)",
    "touch": "s3fs.S3FileSystem._call_s3 = fails\n    filesystem.touch(path)",
    "mv": "s3fs.S3FileSystem._cp_file = fails\n    filesystem.mv(f'{root}/other', path)",
}


@pytest.mark.full
@pytest.mark.parametrize("way", FAILS_ON_S3)
def test_a_failed_put_on_s3(tmp_path: Path, s3: str, way: str) -> None:
    """The script goes on, and what was there before stays."""
    job = job_at(tmp_path, f"{s3}/run")
    script = """
import gc, s3fs
gc.disable()
def fails(*args, **kwargs): raise OSError("full")
calls, copies = s3fs.S3FileSystem._call_s3, s3fs.S3FileSystem._cp_file
open("here", "wb").write(b"data")
path = f"{root}/last/optim"
step()
file("other"); file("last/model"); filesystem.touch(path)
step()
filesystem.open(f"{root}/dropped", "wb").write(b"data")
assert filesystem.exists(f"{root}/dropped")
file("last/model")
try:
    WAY
except OSError: pass
s3fs.S3FileSystem._call_s3, s3fs.S3FileSystem._cp_file = calls, copies
step()
"""
    (tmp_path / "script.py").write_text(HEAD + script.replace("WAY", FAILS_ON_S3[way]))
    job.run("script.py", f"{s3}/run")
    saves = [each for each in job.record().saves if each.entry.path == "last"]
    assert [(each.count, each.proved) for each in saves] == [(1, True), (2, False)]
    assert saves[0].files.keys() == {"last/model", "last/optim"}
    assert FAILED in saves[1].why


@pytest.mark.seam
def test_functions_of_fsspec_stay_as_they_are(tmp_path: Path) -> None:
    job = job_at(tmp_path, "memory://bucket/run")
    script = """
import fsspec.asyn, inspect, pickle
kind = fsspec.AbstractFileSystem
for function in (kind.open, kind.copy, kind.rm, fsspec.asyn.sync_wrapper):
    assert pickle.loads(pickle.dumps(function)) is function
    assert function.__doc__
assert list(inspect.signature(kind.copy).parameters)[:4] == ["self", "path1", "path2", "recursive"]
file("old/x")
filesystem.copy(f"{root}/old/x", f"{root}/new", False, None)
filesystem.copy(path1=f"{root}/old/x", path2=f"{root}/named")
def opens(): filesystem.open(f"{root}/old/x", mode=None)
for call in (opens, filesystem.copy, kind.rm, kind.open):
    try: call()
    except TypeError as error: print(error)
    else: raise SystemExit(1)
opened = filesystem.open(f"{root}/open", "wb")
pickle.dumps(vars(opened)["_elastic_ext_writes"])
step()
"""
    (tmp_path / "script.py").write_text(HEAD + script)
    shown = job.run("script.py", "memory://bucket/run")
    assert "NoneType" in shown
    assert "copy() missing 2 required positional arguments" in shown
    assert {each.entry.path for each in job.record().saves} == {"old", "new", "named", "open"}


@pytest.mark.seam
@pytest.mark.parametrize("line", ["filesystem.open(root + '/x', 'nonsense')", "filesystem.copy('nowhere/x', root + '/y')"])
def test_errors_of_filesystems_reach_the_script(tmp_path: Path, line: str) -> None:
    job = job_at(tmp_path, "memory://bucket/run")
    (tmp_path / "script.py").write_text(f"{HEAD}\n{line}\n")
    shown = job.run("script.py", "memory://bucket/run", code=1)
    assert "Error" in shown
    assert "no longer recorded" not in shown
