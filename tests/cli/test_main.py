"""The command `elastic-ext` itself."""

import pytest

import elastic_ext
from elastic_ext.cli import main


def test_its_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"elastic_ext {elastic_ext.__version__}\n")
