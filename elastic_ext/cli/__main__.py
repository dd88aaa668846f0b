"""`python -m elastic_ext.cli`: the same as `elastic-ext`, even if the package is not installed."""

from elastic_ext.cli.main import command

command()
