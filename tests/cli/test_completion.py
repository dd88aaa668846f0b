"""Completion of `elastic-ext` in a shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_ext.agent import __main__ as agent
from elastic_ext.base.errors import UsageError
from elastic_ext.cli import main

# As bash does when the user presses Tab after the last word.
COMPLETE = """
source ./script
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_shtab_elastic_ext "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def printed(capsys: pytest.CaptureFixture[str], shell: str) -> str:
    pytest.importorskip("shtab", reason="pip install 'elastic_ext[completion]'")
    with pytest.raises(SystemExit) as end:
        main.main(["--print-completion", shell])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_every_verb_is_in_the_script(capsys, shell):
    script = printed(capsys, shell)
    for verb in ("explain", "status", "timeline", "drain", "checkpoints", "doctor", "quarantine"):
        assert verb in script


@pytest.mark.seam
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("sta", "status"),
        ("d", "doctor drain"),
        ("checkpoints ver", "verify"),
        ("drain n1 --und", "--undo"),
        ("checkpoints ls step", "steps"),
        ("explain ev", "evidence.json"),
    ],
)
def test_bash_completes(capsys, tmp_path: Path, words, found):
    (tmp_path / "script").write_text(printed(capsys, "bash"))
    (tmp_path / "steps").mkdir()
    (tmp_path / "step.txt").touch()
    (tmp_path / "evidence.json").touch()
    subprocess.run(["bash", "-n", "script"], cwd=tmp_path, check=True)
    command = ["bash", "-c", COMPLETE, "bash", "elastic-ext", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert sorted(each.strip().rstrip("/") for each in done.stdout.splitlines()) == found.split(), done.stderr


def test_without_shtab_the_error_names_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main.main(["--print-completion", "bash"]) == 78
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("elastic-ext: --print-completion needs shtab: pip install 'elastic_ext[completion]'")


def test_a_shell_that_is_not_known(capsys):
    with pytest.raises(SystemExit) as end:
        main.main(["--print-completion", "cmd"])
    assert end.value.code == 78
    assert "invalid choice: 'cmd'" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--print-completion", "bash"], ["--print-completion=zsh"]])
def test_the_agent_sends_to_torchrun(argv):
    with pytest.raises(UsageError, match="expected `torchrun --print-completion SHELL`"):
        agent._refuse_completion(argv)
    agent._refuse_completion(["script.py", *argv])
