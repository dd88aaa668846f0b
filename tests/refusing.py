"""`python -m tests.refusing pidfd_open=ENOSYS,mknodat=EPERM COMMAND...`: run a command under a kernel that refuses system calls.

A seccomp filter as containers have one: it holds for the command and all that it starts, and nothing takes it away.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Mapping

# linux/prctl.h, linux/seccomp.h, linux/audit.h
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x00050000, 0x7FFF0000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {
    "pidfd_send_signal": {"x86_64": 424, "aarch64": 424},
    "pidfd_open": {"x86_64": 434, "aarch64": 434},
    "mknod": {"x86_64": 133},
    "mknodat": {"x86_64": 259, "aarch64": 33},
    "memfd_create": {"x86_64": 319, "aarch64": 279},
    "prlimit64": {"x86_64": 302, "aarch64": 261},
}
# linux/bpf_common.h: load a word of the data, jump if equal, return
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06

MACHINE = platform.machine()
possible = sys.platform == "linux" and MACHINE in ARCHITECTURES


def refuse(calls: Mapping[str, int]) -> None:
    """From now on these calls fail with these errors, in this process and all that it starts. Raises OSError."""
    instructions = [
        struct.pack("=HBBI", LOAD, 0, 0, 4),  # of struct seccomp_data: the architecture
        struct.pack("=HBBI", JUMP_IF_EQUAL, 1, 0, ARCHITECTURES[MACHINE]),
        struct.pack("=HBBI", RETURN, 0, 0, SECCOMP_RET_ALLOW),
        struct.pack("=HBBI", LOAD, 0, 0, 0),  # the number of the call
    ]
    for name, code in calls.items():
        number = NUMBERS[name].get(MACHINE)
        if number is not None:
            instructions.append(struct.pack("=HBBI", JUMP_IF_EQUAL, 0, 1, number))
            instructions.append(struct.pack("=HBBI", RETURN, 0, 0, SECCOMP_RET_ERRNO | code))
    instructions.append(struct.pack("=HBBI", RETURN, 0, 0, SECCOMP_RET_ALLOW))
    code = ctypes.create_string_buffer(b"".join(instructions))
    program = struct.pack("@HP", len(instructions), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp filter")


if __name__ == "__main__":
    refuse({name: getattr(errno, code) for name, code in (each.split("=") for each in sys.argv[1].split(","))})
    os.execvp(sys.argv[2], sys.argv[2:])
