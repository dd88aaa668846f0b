"""Which GPU each worker of this node has, as NVML names it: what joins our series to DCGM's. Makes no CUDA context."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger(__name__)

_LIBRARY = "libnvidia-ml.so.1"
_UUID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE of nvml.h
UUID_PREFIXES = ("GPU-", "MIG-")


class Asked:
    """A question to a driver, which may take seconds or never answer. It is asked once, on a thread of its own."""

    def __init__(self, ask: Callable[[], Sequence[str]]) -> None:
        self._ask = ask
        self._answer: Sequence[str] = ()
        self._thread: threading.Thread | None = None

    def answer(self) -> Sequence[str]:
        """Return the answer; () as long as there is none. The first call asks. For one thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="elastic_ext-gpus", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads
                logger.warning("metrics: no GPU is named: %s", error)
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = self._ask()
        except Exception:  # the top of a thread
            logger.exception("metrics: no GPU is named")


def uuids() -> list[str]:
    """Return the UUIDs of this host's GPUs, in the order of the PCI bus; empty if there is no NVML, or it does not answer."""
    try:
        nvml = ctypes.CDLL(_LIBRARY)
    except OSError:
        return []
    if (error := nvml.nvmlInit_v2()) != 0:
        logger.info("metrics: no GPU is named: NVML does not start (error %s)", error)
        return []
    try:
        return _uuids(nvml)
    finally:
        nvml.nvmlShutdown()


def _uuids(nvml: ctypes.CDLL) -> list[str]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    found = []
    for index in range(count.value):
        device, text = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0
        failed = failed or nvml.nvmlDeviceGetUUID(device, text, ctypes.c_uint(_UUID_BYTES)) != 0
        found.append("" if failed else text.value.decode(errors="replace"))
    return found


def by_local_rank(workers: int, host: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the UUID of each worker's GPU, by local rank; "" where it is not known.

    Each worker is taken to use the device of its local rank, as torchrun's scripts do, among those that CUDA_VISIBLE_DEVICES
    leaves it: indices, or UUIDs that may be cut short (CUDA's programming guide). CUDA numbers GPUs of different speed in
    another order than the PCI bus, unless CUDA_DEVICE_ORDER=PCI_BUS_ID is set.

    Args:
        host: UUIDs of all GPUs of this host; see `uuids`.
        environ: of the workers.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = list(host) if visible is None else [_named(each.strip(), host) for each in visible.split(",")]
    return [chosen[local_rank] if local_rank < len(chosen) else "" for local_rank in range(workers)]


def _named(device: str, host: Sequence[str]) -> str:
    if device.startswith(UUID_PREFIXES):
        return next((each for each in host if each.startswith(device)), device)
    return host[int(device)] if device.isdecimal() and int(device) < len(host) else ""
