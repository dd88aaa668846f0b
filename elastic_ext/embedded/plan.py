"""The orders of an embedded store at its start, and where the agents of its host find it. Standard library only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

BUILD = "+elastic_ext"  # the end of the version that a store gives; see `service`


@dataclass(frozen=True)
class StoreEndpoint:
    """Where the nodes of a job meet. host: a name or a numeric address, without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class StorePlan:
    """The orders of a store at its start."""

    host: str  # the address to listen on, numeric
    port: int
    # ca, cert, key: PEM texts; "": without TLS. With it, clients need a certificate of this CA.
    ca: str = ""
    cert: str = ""
    key: str = ""
    job: str = ""  # which job it is for; see `base.helper_process.Helper`
    # run_id, ledger_file: of the job whose ledger outlives the store in this file; "": nothing does.
    run_id: str = ""
    ledger_file: str = ""

    @property
    def address(self) -> str:
        return str(StoreEndpoint(self.host, self.port))

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def socket_of(port: int) -> str:
    """Return the abstract name of the Unix socket of the store that listens on this port."""
    return f"\0elastic_ext_store_{port}"
