"""The recovery action that the NVIDIA driver recommends for each GPU (NVML, drivers since 2024)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.base import isolated
from elastic_ext.failures.sources import commands

TIMEOUT_S = 2.0  # a hung driver never answers; a child process can be left behind, a thread of the agent cannot

# nvmlDeviceGpuRecoveryAction_t in nvml.h
ACTIONS = {0: "none", 1: "gpu_reset", 2: "node_reboot", 3: "drain_p2p", 4: "drain_and_reset", 5: "gpu_reset_bus"}


@dataclass(frozen=True)
class RecoveryAction:
    """The action for one GPU. pci: its address. action: from ACTIONS, or "action N" if newer; None if the driver reports none."""

    pci: str
    action: str | None


def recovery_actions(timeout_s: float = TIMEOUT_S) -> list[RecoveryAction] | None:
    """Return one action per GPU; None without pynvml, a driver that supports this, or an answer in time."""
    probe = str(Path(__file__).with_name("nvml_probe.py"))
    return parse(commands.output(isolated.command(probe), timeout_s))


def parse(text: str | None) -> list[RecoveryAction] | None:
    """Read the probe's output: a JSON list of [PCI address, action or null]; None for anything else."""
    try:
        found = json.loads(text or "")
        return [
            RecoveryAction(str(pci), None if action is None else ACTIONS.get(int(action), f"action {int(action)}"))
            for pci, action in found
        ]
    except (ValueError, TypeError):
        return None
