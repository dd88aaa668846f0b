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
chooses among them, and verifies. `candidates` reads what names say. Nothing else in this package is public.

A check reads names, sizes, small files and the tail of large ones, but no tensors; `verify` reads everything. It never unpickles,
because a checkpoint is data and unpickling runs code (`single_files.peek` runs none). It reports "complete" or what is missing,
and does not raise for a damaged checkpoint.
"""

from elastic_ext.checkpoints.formats.candidates import Format, Inspection
from elastic_ext.checkpoints.storage import Entry, Storage

__all__ = ["Entry", "Format", "Inspection", "Storage"]
