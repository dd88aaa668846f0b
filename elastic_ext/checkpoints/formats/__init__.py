"""Checkpoint formats, and the interface for custom formats.

A custom format is an object with the two methods of `Format`. An installed package registers it as an entry point in the group
`elastic_ext.formats`:

    [project.entry-points."elastic_ext.formats"]
    mine = "my_package.checkpoints:MyFormat"

    from elastic_ext.checkpoints.formats import Entry, Inspection, Storage

    class MyFormat:
        def claims(self, entry: Entry) -> bool:
            return entry.name.endswith(".mine")

        def check(self, storage: Storage, entry: Entry) -> Inspection:
            whole = storage.read(entry.name).endswith(b"END")
            return Inspection(whole, "mine", "it ends as it should" if whole else "its end is missing", entry.mtime)

`single_files` knows the formats of a single file, `layouts` those of directories, with a table of those of tools. `detect`
chooses among them, and verifies. `names` reads what names say. Nothing else in this package is public.
"""

from elastic_ext.checkpoints.formats.inspection import Format, Inspection
from elastic_ext.checkpoints.storage import Entry, Storage

__all__ = ["Entry", "Format", "Inspection", "Storage"]
