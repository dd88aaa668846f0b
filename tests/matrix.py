"""The suite on several versions of torch and Python: `python -m tests.matrix [--seam] [TORCH:PYTHON ...]`.

TORCH is a version or a series of them, such as 2.14.1 or 2.14, or `newest`. PYTHON is a series: python3.13 must be on the PATH
for 3.13. Each pair gets an environment of its own below $MATRIX_DIR (.matrix by default), gigabytes each, kept for the next time.
Torch is the build for CPUs where pip finds one; else that for CUDA, without the libraries that its import does not need.

Each run writes its result as it ends, with the versions that really ran, and the table of docs/limits.md. One whose result is
there, of these tests and this package, is not run again. What could not be had is not run: that is said, and fails the command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from tests import reference, versions
from tests.jobs import ROOT
from tests.run import TESTS_FAILED
from tests.versions import Ran

PAIRS = ("2.8:3.10", "2.10:3.11", "2.12:3.12", "2.13:3.12", "2.14:3.13", "newest:3.13", "newest:3.14")
SUITE = (
    "tests/agent/test_plugin.py",
    "tests/agent/test_supervisor.py",
    "tests/agent/test_main.py",
    "tests/base/test_torch_names.py",
    "tests/failures/test_torch_texts.py",
    "tests/hangs/test_recorder.py",
    "tests/hangs/test_recorder_hook.py",
    "tests/rendezvous/test_etcd_jobs.py",
    "tests/workers/test_bootstrap.py",
    "tests/workers/standby/test_standby.py",
)
NEWEST = "newest"
# None of the libraries of torch 2.14 and 2.15 that its import loads is linked to these (`readelf -d`): 1.4 GB of 4.3.
UNUSED = r"Requires-Dist: (triton|cuda-bindings)\b.*\n"
UNUSED_EXTRA = r",?\b(cusolver|nvtx)\b"
VERSIONS = "import json, platform, torch; print(json.dumps([torch.__version__, platform.python_version()]))"


class NotRun(Exception):
    """A run could not begin or did not come to its end."""


@dataclass(frozen=True)
class Pair:
    torch: str
    python: str

    @property
    def requirement(self) -> str:
        """What pip is to install, in any build."""
        return f"torch=={self.torch}" if self.torch.count(".") > 1 else f"torch=={self.torch}.*"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", default=PAIRS, metavar="TORCH:PYTHON", help=f"default: {' '.join(PAIRS)}")
    parser.add_argument("--seam", action="store_true", help="the tests of the tier `seam`, not the short suite")
    parser.add_argument("--only", action="append", default=[], metavar="FOLDER", help="of tests, with --seam; may be repeated")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)
    what = versions.SEAM if args.seam else versions.SUITE
    ends = []
    for each in args.pairs:
        try:
            ran = run(pair_of(each), what, tuple(args.only), args.processes, args.again)
            reference.write()
            ends.append((each, ran.cell(), not ran.failed))
        except NotRun as error:
            ends.append((each, f"{versions.NOT_RUN}: {error}", False))
        print(f"matrix: {what} on {each}: {ends[-1][1]}", flush=True)
    print(f"\nmatrix: {what}", *(f"  {each}: {end}" for each, end, _ in ends), sep="\n")
    return 0 if all(good for _, _, good in ends) else 1


def pair_of(text: str) -> Pair:
    """Return the pair that an argument names; raise NotRun if pip does not say which torch is the newest."""
    torch, _, python = text.partition(":")
    if torch == NEWEST:
        index = output([sys.executable, "-m", "pip", "index", "versions", "torch"])
        if (found := re.search(r"^torch \((\S+)\)", index)) is None:
            raise NotRun(f"pip index versions torch says {index!r}")
        torch = versions.series(found[1])
    return Pair(torch, python)


def run(pair: Pair, what: str, parts: tuple[str, ...], processes: int, again: bool) -> Ran:
    """Run it in its environment, unless there is a result; raise NotRun if it cannot come to its end."""
    python = environment(pair)
    torch_version, python_version = json.loads(output([str(python), "-c", VERSIONS]))
    begun = Ran(what, torch_version, python_version, today(), commit(), parts=parts)
    if not again and (known := still_holds(begun)) is not None:
        return known
    if begun.pair[1] != pair.python:
        raise NotRun(f"{python} is Python {python_version}; delete its environment")
    print(f"matrix: {what} on torch {torch_version}, Python {python_version}", flush=True)
    tiers = [versions.SEAM] if what == versions.SEAM else ["check", "seam", "full"]
    paths = parts or (["tests"] if what == versions.SEAM else [each for each in SUITE if (ROOT / each).exists()])
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"
        options = [f"--processes={processes}", f"--counts={counts}", "--paths", *paths]
        code = subprocess.run([str(python), "-m", "tests.run", *tiers, *options], cwd=ROOT, check=False).returncode
        if code not in (0, TESTS_FAILED) or not counts.exists():
            raise NotRun(f"tests.run ended with {code}")
        fields = json.loads(counts.read_text())
    at = begun.commit if commit() == begun.commit else ""  # else something was changed meanwhile
    ran = dataclasses.replace(begun, date=today(), commit=at, **{**fields, "flaky": tuple(fields["flaky"])})
    ran.write()
    return ran


def environment(pair: Pair) -> Path:
    """Return the Python of its environment, which is made if it is not there; raise NotRun if it cannot be made."""
    folder = Path(os.environ.get("MATRIX_DIR", ROOT / ".matrix")) / f"{pair.torch}-{pair.python}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        if ready.read_text() != str(ROOT):  # another checkout made it, and its package would be tested
            output([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--editable", "."])
            ready.write_text(str(ROOT))
        return python
    interpreter = f"python{pair.python}"
    says = output([interpreter, "-c", "import platform; print(platform.python_version())"]).strip()
    if versions.series(says) != pair.python:
        raise NotRun(f"{interpreter} is Python {says}")
    output([interpreter, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip"]
    output([*pip, "install", "--quiet", "--no-deps", cpu_build(pair, output([*pip, "index", "versions", "torch"]))])
    for metadata in folder.glob("lib/python*/site-packages/torch-*.dist-info/METADATA"):
        metadata.write_text(lightened(metadata.read_text()))
    output([*pip, "install", "--quiet", "--editable", ".[test]"])
    # as for `make .venv/.ready`: the types of an older Trainer, beside those of the newest
    output([*pip, "install", "--quiet", "--no-deps", "--target", str(folder / "trainer-2.1.0"), "kubeflow-trainer-api==2.1.0"])
    ready.write_text(str(ROOT))
    return python


def cpu_build(pair: Pair, index: str) -> str:
    """Return what pip is to install: the newest build for CPUs of this torch, if `pip index versions` lists one."""
    found = re.search(rf"\b{re.escape(pair.torch)}(?:\.\d+)*\+cpu", index)
    return pair.requirement if found is None else f"torch=={found[0]}"


def lightened(metadata: str) -> str:
    """Return torch's METADATA without what its import does not need."""
    metadata = re.sub(UNUSED, "", metadata)
    return re.sub(
        r"^Requires-Dist: cuda-toolkit\[[^]]*\]",
        lambda found: re.sub(UNUSED_EXTRA, "", found[0]).replace("[,", "["),
        metadata,
        flags=re.MULTILINE,
    )


def output(command: Sequence[str]) -> str:
    """Return what a command prints; raise NotRun if it fails, with its last line."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotRun(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise NotRun(f"{' '.join(command)} ended with {done.returncode}: {last}")
    return done.stdout


def still_holds(ran: Ran) -> Ran | None:
    """Return the result that is there if it has these versions and parts, and nothing that it depends on has changed since."""
    known = next((each for each in versions.read() if each.path == ran.path and each.what == ran.what), None)
    if known is None or known.failed or (known.torch, known.python, known.parts) != (ran.torch, ran.python, ran.parts):
        return None
    return known if known.commit and unchanged(known.commit) else None


def unchanged(commit: str) -> bool:
    """Return whether the tests and the package are those of this commit; the pages may differ."""
    command = [
        "git",
        "diff",
        "--quiet",
        commit,
        "--",
        "elastic_ext",
        "tests",
        "pyproject.toml",
        ":!elastic_ext/docs",
        ":!tests/data/matrix",
    ]
    return subprocess.run(command, cwd=ROOT, check=False, stderr=subprocess.DEVNULL).returncode == 0


def commit() -> str:
    """Return the commit that is checked out; "" if the package or the tests differ from it."""
    head = output(["git", "rev-parse", "HEAD"]).strip()
    return head if unchanged(head) else ""


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


if __name__ == "__main__":
    sys.exit(main())
