"""One directory of checkpoints, on a local filesystem or behind any fsspec URL.

contract.py   what every storage promises: `Storage`, `Entry`
local.py      the local filesystem, or one that is mounted
remote.py     everything else that fsspec can open: object stores, sftp, memory
opening.py    from a path or URL to a storage
polling.py    wait for a change that a storage does not announce
"""

from elastic_ext.checkpoints.storage.contract import Entry, Storage
from elastic_ext.checkpoints.storage.opening import open_parent, open_storage, split_path
from elastic_ext.checkpoints.storage.polling import polled

__all__ = ["Entry", "Storage", "open_parent", "open_storage", "polled", "split_path"]
