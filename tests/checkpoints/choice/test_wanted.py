"""Which one is asked for, which one may be trusted, and what a choice costs the storage."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from elastic_ext.base.errors import UsageError
from elastic_ext.checkpoints.choice.decisions import Choice
from elastic_ext.checkpoints.choice.listing import Wanted, newest_complete
from elastic_ext.checkpoints.directory import own_files
from elastic_ext.checkpoints.formats.candidates import directory_name
from elastic_ext.checkpoints.storage import LocalStorage, RemoteStorage, Storage, open_storage
from tests.checkpoints.choice.scenes import resume_in
from tests.checkpoints.formats.test_formats import save_own


def chosen(directory: str, **wanted: Any) -> str:
    return os.path.basename(resume_in(directory, **wanted).path)


@pytest.mark.full("s3")
def test_quarantined_ones_are_passed_over_until_lifted(where: str) -> None:
    held = open_storage(where)
    names = [save_own(held, step) for step in (1, 2, 3)]
    assert chosen(where) == names[2]
    own_files.quarantine(held, names[2], "KeyError at load, twice", "agent")
    choice = newest_complete(where)
    assert chosen(where) == names[1]
    assert [(passed.path, passed.reason, passed.distrusted) for passed in choice.passed_over] == [
        (held.path(names[2]), "quarantined: KeyError at load, twice", True)
    ]
    assert not choice.all_bad
    mark = own_files.quarantine_of(held, names[2])
    assert (mark.by, mark.at > 0) == ("agent", True)
    assert own_files.quarantined_names(held) == {names[2]}
    own_files.lift_quarantine(held, names[2])
    assert chosen(where) == names[2]
    with pytest.raises(FileNotFoundError):
        own_files.lift_quarantine(held, names[2])


@pytest.mark.full("s3")
def test_from_nothing_and_from_one_that_is_named(where: str) -> None:
    held = open_storage(where)
    names = [save_own(held, 7, 1), save_own(held, 8, 1), save_own(held, 7, 2)]
    assert newest_complete(where, Wanted(resume_from="none")) == Choice(None)
    assert chosen(where, resume_from="8") == names[1]
    assert chosen(where, resume_from="7") == names[2]  # the newer of the two
    for text in (names[0], held.path(names[0]), held.path(names[0]) + "/"):
        assert chosen(where, resume_from=text) == names[0]
    assert resume_in(where, resume_from="8").reason.startswith("named by resume_from, ")


def test_one_that_is_named_and_cannot_be_used(tmp_path: Path) -> None:
    names = [save_own(tmp_path, step) for step in (1, 2)]
    with pytest.raises(UsageError, match=r"resume_from=77: no such checkpoint in .*, which holds step_00000002"):
        newest_complete(str(tmp_path), Wanted(resume_from="77"))
    with pytest.raises(UsageError, match="no such checkpoint"):
        newest_complete(str(tmp_path), Wanted(resume_from="model_2.pt"))
    own_files.quarantine(open_storage(str(tmp_path)), names[1], "bad")
    with pytest.raises(UsageError, match=r"resume_from=2 cannot be used: .*quarantined: bad"):
        newest_complete(str(tmp_path), Wanted(resume_from="2"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each storage was asked, and what."""
    counted: Counter[str] = Counter()

    def count(kind: type[Storage], name: str) -> None:
        inner = getattr(kind, name)

        def outer(self: Storage, *args: Any) -> Any:
            counted[name] += 1
            return inner(self, *args)

        monkeypatch.setattr(kind, name, outer)

    for kind in (LocalStorage, RemoteStorage):
        for name in ("entries", "stat", "open"):
            count(kind, name)
    return counted


@pytest.mark.full("s3")
def test_one_listing_and_one_for_the_candidate(where: str, calls: Counter[str]) -> None:
    held = open_storage(where)
    for step in range(1, 21):
        save_own(held, step)
    calls.clear()
    assert chosen(where) == directory_name(20, 1)
    # The directory, the checkpoint, its folder of one rank's files; its manifest.
    assert calls == {"entries": 3, "open": 1}
    held.put(".elastic_ext/generation-00000001", b"{}")
    calls.clear()
    assert chosen(where) == directory_name(20, 1)
    assert calls == {"entries": 3, "open": 2}  # and one question for a mark of the one candidate, no listing of marks
