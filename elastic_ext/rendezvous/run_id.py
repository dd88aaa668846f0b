"""Names that become parts of keys: of a job, and of a host; and what tells machines of one name apart. Standard library only."""

import os
import platform
from pathlib import Path

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import printable
from elastic_ext.base.records import MAX_NAME, is_name
from elastic_ext.base.settings import Settings


def checked(run_id: str) -> str:
    """Return the run id if no other job can share its keys: those of a job `a/nodes` would lie among the nodes of job `a`.

    Raises UsageError if one could, or if the run id is too long.
    """
    if is_name(run_id):
        return run_id
    seen = f"{len(run_id)} characters" if len(run_id) > MAX_NAME else f"'{printable(run_id)}'"
    raise UsageError(f"--rdzv-id: expected 1 to {MAX_NAME} printable characters without a /, got {seen}; choose another one")


def checked_given(run_id: str) -> str:
    """Return the run id of a job on etcd. Raises UsageError: see `checked`; or the user has given none."""
    if run_id in ("", "none"):
        raise UsageError(
            "ext_etcd needs --rdzv-id: without one, two jobs would share their state; give each job its own (on Kubernetes "
            "PET_RDZV_ID from the UID of the Job or JobSet, see entrypoints/kubernetes)"
        )
    return checked(run_id)


def host_name(settings: Settings) -> str:
    """Return this node's name in a form that fits in a key. The kernel allows any bytes in a host name."""
    if settings.node_name is not None:
        return settings.node_name
    name = "".join(character if is_name(character) else "-" for character in platform.node())
    return name[:MAX_NAME] or "localhost"


def machine() -> str:
    """Return what the kernel calls this boot of this machine, in most containers as well; "" if it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def network() -> str:
    """Return a name of the network in which this process has its loopback, of this machine or of a container; "" if unknown."""
    try:
        return f"{machine()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def checked_address(address: str) -> str:
    """Return the address that this node gives to the others. Raises UsageError if they could not read it."""
    if is_name(address):
        return address
    raise UsageError(f"--local-addr='{printable(address)[:MAX_NAME]}': expected an address or the name of a host")
