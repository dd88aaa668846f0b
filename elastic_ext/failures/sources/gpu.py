"""What the NVIDIA driver recommends to do with each GPU (NVML's recovery action, drivers from 2024 on)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.base import isolated
from elastic_ext.failures.sources import commands

TIMEOUT_S = 2.0  # a hung driver answers never: a child process can be left behind, a thread of the agent could not

# nvmlDeviceGpuRecoveryAction_t in nvml.h
ACTIONS = {0: "none", 1: "gpu_reset", 2: "node_reboot", 3: "drain_p2p", 4: "drain_and_reset", 5: "gpu_reset_bus"}


@dataclass(frozen=True)
class RecoveryAction:
    """pci: the GPU. action: one of ACTIONS, or "action N" for one newer than this table; None: the driver does not tell."""

    pci: str
    action: str | None


def recovery_actions(timeout_s: float = TIMEOUT_S) -> list[RecoveryAction] | None:
    """One per GPU; None without pynvml, without a driver that knows, or without an answer in time."""
    probe = str(Path(__file__).with_name("nvml_probe.py"))
    return parse(commands.output(isolated.command(probe), timeout_s))


def parse(text: str | None) -> list[RecoveryAction] | None:
    """What the probe has printed."""
    try:
        found = json.loads(text or "")
        return [
            RecoveryAction(str(pci), None if action is None else ACTIONS.get(int(action), f"action {int(action)}"))
            for pci, action in found
        ]
    except (ValueError, TypeError):
        return None
