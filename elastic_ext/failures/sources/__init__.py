"""Sources of evidence on the host: the kernel, the GPU driver, Kubernetes, Slurm.

Each source answers with plain values within its deadline and never raises, whatever the host looks like. None means "unknown"
(no such file, no permission to read it, no answer in time), never "fine".
"""

from elastic_ext.failures.sources.gpu import RecoveryAction, recovery_actions
from elastic_ext.failures.sources.kernel_log import KernelLog, Xid, parse_xid
from elastic_ext.failures.sources.memory import oom_counts, oom_kills_since
from elastic_ext.failures.sources.platforms import deletion_grace_s, detect

__all__ = [
    "KernelLog",
    "RecoveryAction",
    "Xid",
    "deletion_grace_s",
    "detect",
    "oom_counts",
    "oom_kills_since",
    "parse_xid",
    "recovery_actions",
]
