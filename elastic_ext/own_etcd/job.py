"""What a keeper is told at its start, as JSON on its standard input: the job's secret is in no command line or environment."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ext.own_etcd.binary import Program
from elastic_ext.own_etcd.endpoint import Plan
from elastic_ext.own_etcd.hosts import Host


@dataclass(frozen=True)
class KeeperJob:
    """A job as one keeper sees it.

    Attributes:
        own: this host.
        folder: for its files here.
        secret: of the job.
        program: etcd's; None: this host cannot run a member.
        saved_dir: the setting `etcd_data_dir`; None: nothing outlives the job.
    """

    plan: Plan
    own: Host
    folder: Path
    secret: bytes
    program: Program | None
    saved_dir: str | None

    @property
    def is_first_member(self) -> bool:
        """Whether this host runs one of the members that the job begins with."""
        return self.own.name in self.plan.hosts

    def dump(self) -> bytes:
        fields: dict[str, Any] = dataclasses.asdict(self)
        return json.dumps({**fields, "folder": str(self.folder), "secret": self.secret.hex()}).encode()


def load(data: bytes) -> KeeperJob:
    """Return what `dump` wrote. It comes from the same user's agent, through a pipe."""
    fields = json.loads(data)
    plan, program = fields["plan"], fields["program"]
    return KeeperJob(
        Plan(plan["run_id"], tuple(plan["hosts"]), tuple(plan["others"]), plan["client_port"]),
        Host(**fields["own"]),
        Path(fields["folder"]),
        bytes.fromhex(fields["secret"]),
        Program(program["path"], tuple(program["version"]), program["source"]) if program is not None else None,
        fields["saved_dir"],
    )
