"""Checkpoint formats, and the interface for a format of your own.

Your format is an object with the two methods of `Format`. An installed package offers it as an entry point of the group
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

The formats that are built in have one module each (`own`, `torch_save`, `dcp`, `lightning`, `huggingface`, `safetensors`);
`detect` has the table that chooses among them. Nothing else in this package is an interface for other packages.
"""

from elastic_ext.checkpoints.formats.inspection import Format, Inspection
from elastic_ext.checkpoints.storage import Entry, Storage

Verdict = Inspection  # the former name of `Inspection`, kept for one release

__all__ = ["Entry", "Format", "Inspection", "Storage", "Verdict"]
