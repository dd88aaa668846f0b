"""Whose lines tell of an abort, and what servers answer: pure."""

import pytest

from elastic_ext.failures import servers
from elastic_ext.failures.abort_lines import LINE_WRITERS, abort_lines
from elastic_ext.failures.fingerprints import library_of

# A line that each writer has written, by its name.
WRITTEN = {
    "torch's log, at the levels error and fatal": "[rank3]:[E602 11:18:52.536602063 ProcessGroupNCCL.cpp:1896] [PG ID 0] Rank 3",
    "a process group of torch, nccl2's": "[TC][rank=1] Aborting process on rank 1 due to timeout",
    "glog": "[rank1]:E1129 09:00:00.123000 900 torch/distributed/_watchdog.py:300] Default timeout callback fired",
    "NCCL": "gpu07:1204:1377 [3] transport/net_ib.cc:1297 NCCL WARN NET/IB : Got completion from peer 10.0.0.2",
    "NCCL, without its host": "NCCL WARN Broken pipe",
    "the C++ runtime": "terminate called after throwing an instance of 'c10::DistBackendError'",
    "Python's fault handler": "Fatal Python error: Aborted",
    "LLVM": "LLVM ERROR: out of memory",
    "glibc, its heap": "double free or corruption (out)",
    "glibc, its stack": "*** stack smashing detected ***: terminated",
    "UCX": "[1718000000.123456] [gpu07:1204 :0] ib_mlx5_log.c:177  UCX  ERROR Transport retry count exceeded on mlx5_0:1/RoCE",
    "an assertion of C": "python: malloc.c:2617: sysmalloc: Assertion `(old_top == initial_top (av))' failed.",
    "an assertion on a GPU": "/pytorch/aten/IndexKernel.cu:92: operator(): block: [0,0,0] Assertion `i < n` failed.",
    "ROCm": ":0:rocdevice.cpp            :2984: 81727371us:  Queue 0x7fd8ca aborting with error : HSA_STATUS_ERROR",
    "ROCm's driver": "Memory access fault by GPU node-2 (Agent handle: 0x55d) on address 0x7f0. Reason: Unknown.",
    "Slurm": "slurmstepd: error: Detected 1 oom_kill event in StepId=71.0. Some of the step tasks have been OOM Killed.",
}
SURVIVED = (
    "conv.py:456: UserWarning: Plan failed with an OutOfMemoryError: CUDA out of memory (Triggered internally)",
    "[W1129 09:00:00.5 socket.cpp:464] [c10d] The client socket has failed to connect to [::]:29500 (errno: 111)",
    "2026-11-29 10:00:00,123 ERROR trainer: NCCL WARN was seen",
    "RuntimeError: [Rank 3] Watchdog caught collective operation timeout",
    "wandb: ERROR 403 Client Error: Forbidden",
    "[Rank 0] store based barrier is done",
    "*** heartbeat monitor timed out is normal ***",
    "[E train.py] CUDA out of memory",
    "  what(): CUDA out of memory",
)


@pytest.mark.parametrize("writer", LINE_WRITERS, ids=lambda each: each.name)
def test_a_line_of_each_writer(writer):
    line = WRITTEN[writer.name]
    for before in ("", "[default0]:", "3: "):
        tail = f"step 1\n{before}{line}\n\nstep 2\n"
        assert abort_lines(tail).libraries == f"{before}{line}"


def test_a_line_behind_a_progress_bar():
    bar = "\rEpoch 3:  45%|#### | 9/20 [00:01<00:01, 9.00it/s]\rEpoch 3:  50%|#### | 10/20 [00:01<00:01, 9.00it/s]"
    line = "[rank3]:[E718 11:18:52.536602063 ProcessGroupNCCL.cpp:685] [Rank 3] Watchdog caught collective operation timeout"
    assert abort_lines(f"step 1\n{bar}{line}\n").libraries == f"{bar}{line}"


def test_what_a_script_survives_is_no_last_word():
    assert set(WRITTEN) == {each.name for each in LINE_WRITERS}
    assert abort_lines("\n".join(SURVIVED)).libraries == ""


@pytest.mark.parametrize(
    ("behind", "ends"),
    [
        ("", True),
        ("\n", True),
        ("\n[rank3]: Traceback (most recent call last):\n  File", True),
        ("\nException raised from checkTimeout at ProcessGroupNCCL.cpp:685\nframe #0: c10::Error + 0x9d\n", True),
        (
            "\n[rank3]:[W718 11:18:53.1 ProcessGroupNCCL.cpp:1250] Warning: process group has NOT been destroyed\nwandb: done",
            True,
        ),
        ("\nstep 11 loss 2.1\n[rank3]: Traceback (most recent call last):", False),
    ],
)
def test_last_words_stand_at_the_end(behind, ends):
    line = "[rank3]:[E718 11:18:52.536602063 ProcessGroupNCCL.cpp:685] [Rank 3] Watchdog caught collective operation timeout"
    assert abort_lines(f"step 10 loss 2.1\n{line}{behind}").at_the_end is ends
    assert not abort_lines("step 10").at_the_end


def test_what_was_thrown_has_several_lines():
    thrown = (
        "terminate called after throwing an instance of 'sycl::exception'\n  what():  Enqueue failed.\nerror: 39 (OUT_OF_MEMORY)"
    )
    assert abort_lines(f"step 1\n{thrown}\n\nCUDA out of memory\n").libraries == thrown
    last_error = (
        "[rank3]:[E ProcessGroupNCCL.cpp:9] [Rank 3] NCCL error: unhandled system error\nLast error:\nToo many open files"
    )
    assert abort_lines(f"{last_error}\nstep 2\n").libraries == last_error
    of_rank = "\n".join(f"[rank3]: {line}" for line in last_error.split("\n"))
    assert abort_lines(f"{of_rank}\nstep 2\n").libraries == of_rank


@pytest.mark.parametrize(
    ("message", "of_client", "said"),
    [
        ("429 client error: too many requests for url: https://x", False, {"429", servers.BUSY}),
        ("522 server error for url: https://x", False, {"522", servers.BUSY}),
        ("500 shards are missing", False, set()),
        ("error uploading run: returned error 401: {}", True, {"401", servers.REFUSED}),
        ("client error '401 unauthorized' for url 'https://x'", False, {"401", servers.REFUSED}),
        ("404, message='not found', url='https://x'", True, {"404", servers.REFUSED}),
        ("an error occurred (slowdown) when calling the putobject operation", True, {"slowdown", servers.BUSY}),
        ("an error occurred (throttledexception) when calling the x operation", True, {"throttledexception", servers.BUSY}),
        ("an error occurred (missingcontentlength) when calling the putobject operation", True,
         {"missingcontentlength", servers.REFUSED}),
        ("an error occurred (slowdown) when calling the putobject operation", False, set()),
        ("<rpc that terminated with:\n\tstatus = statuscode.unavailable>", True, {"unavailable"}),
        ("this request is not authorized\nerrorcode:authorizationfailure", True, {"authorizationfailure", servers.REFUSED}),
        ("learning rate limits must be increasing, got [0.1, 0.001]", True, set()),
        ("http 200, then nothing", True, set()),
    ],
)  # fmt: skip
def test_what_a_server_has_answered(message, of_client, said):
    assert servers.answers(message, message, of_client) == said


@pytest.mark.parametrize(
    ("frames", "library"),
    [
        (("train.py:9 in load", ".../site-packages/botocore/httpsession.py:3 in send", "socket.py:720 in readinto"),
         "botocore.httpsession"),
        (("train.py:9 in load", "/usr/lib/python3/dist-packages/requests/adapters.py:501 in send"), "requests.adapters"),
        ((".../site-packages/torch/nn/module.py:5 in f", "train.py:9 in forward"), ""),
        ((), ""),
    ],
)  # fmt: skip
def test_whose_frame_has_raised(frames, library):
    assert library_of(frames) == library
