"""One directory of checkpoints, on a local filesystem or behind any fsspec URL.

contract.py   the contract of every storage: `Storage`, `Entry`
local.py      local and mounted filesystems
remote.py     everything else that fsspec can open: object stores, sftp, memory
opening.py    open the storage of a path or URL
polling.py    poll a storage for a change
"""

from elastic_ext.checkpoints.storage.contract import Entry, Storage
from elastic_ext.checkpoints.storage.opening import open_parent, open_storage, split_path
from elastic_ext.checkpoints.storage.polling import is_away, poll

__all__ = ["Entry", "Storage", "is_away", "open_parent", "open_storage", "poll", "split_path"]
