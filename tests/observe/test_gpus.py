"""Which GPU a worker has. NVML itself is asked where there is one."""

from __future__ import annotations

import pytest

from elastic_ext.observe import gpus

HOST = ["GPU-a1", "GPU-b2", "GPU-c3"]


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, ["GPU-a1", "GPU-b2"]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, ["GPU-c3", "GPU-a1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b, MIG-7"}, ["GPU-b2", "MIG-7"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["GPU-b2", ""]),
        ({"CUDA_VISIBLE_DEVICES": "7,x"}, ["", ""]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["", ""]),
    ],
)
def test_each_workers_gpu(environ, found):
    assert gpus.by_local_rank(2, HOST, environ) == found


def test_a_host_without_gpus():
    assert gpus.by_local_rank(2, [], {}) == ["", ""]


def test_those_of_this_host():
    assert all(each.startswith("GPU-") for each in gpus.uuids())
