"""Which GPU a worker has. NVML itself is asked where there is one."""

from __future__ import annotations

import ctypes
import threading

import pytest

from elastic_ext.telemetry import agent_metrics

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
    assert agent_metrics.gpus_by_local_rank(2, HOST, environ) == found


def test_a_host_without_gpus():
    assert agent_metrics.gpus_by_local_rank(2, [], {}) == ["", ""]


def test_those_of_this_host():
    assert all(each.startswith("GPU-") for each in agent_metrics.gpu_uuids())


def await_driver():
    for thread in threading.enumerate():
        if thread.name == "elastic_ext-gpus":
            thread.join(60)


def test_a_silent_driver_holds_up_nobody():
    answers = threading.Event()

    def ask():
        answers.wait()
        return ["GPU-1"]

    asked = agent_metrics.GpuQuery(ask)
    assert asked.answer() == ()
    assert asked.answer() == ()
    answers.set()
    await_driver()
    assert asked.answer() == ["GPU-1"]


def test_a_driver_too_old_names_no_gpu(caplog):
    asked = agent_metrics.GpuQuery(lambda: ctypes.CDLL(None).nvmlInit_v2())
    asked.answer()
    await_driver()
    assert asked.answer() == ()
    assert "no GPU is named" in caplog.text
