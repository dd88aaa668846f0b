"""The child process of `host.recovery_actions`. It prints NVML's recommendation for each GPU as JSON:
[[PCI address, action or null], ...].

NVML creates no CUDA context.
"""

import json


def main() -> None:
    import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

    pynvml.nvmlInit()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        (field,) = pynvml.nvmlDeviceGetFieldValues(device, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        # The value is a union whose type the driver names; its first bytes are the same for integers of any width.
        action = field.value.uiVal if field.nvmlReturn == pynvml.NVML_SUCCESS else None
        bus = pynvml.nvmlDeviceGetPciInfo(device).busId
        found.append([bus.decode() if isinstance(bus, bytes) else bus, action])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
