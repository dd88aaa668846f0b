"""For all tests."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.etcd_server import EtcdServer
from tests.s3 import S3Server

TEARDOWN_TIMEOUT_S = 180


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """A clean-up that hangs ends this process, which xdist reports: pytest-timeout no longer looks on once a test has failed."""
    faulthandler.dump_traceback_later(TEARDOWN_TIMEOUT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of the test's own, which it may kill."""
    with EtcdServer(tmp_path / "etcd") as started:
        yield started


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One for all tests of this process; ask for `s3` to use it."""
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket of the test's own; this process and what it starts finds the server by the environment."""
    import s3fs

    for name, value in s3_server.environ.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # each fsspec filesystem keeps the endpoint that it was made with
    return s3_server.bucket()


# Real jobs of half a minute and more whose kind has a shorter test: `make chaos` runs them, `make test` keeps under 20 minutes.
LONG = {
    "test_benchmarks.py": ("test_restart", "test_verdict", "test_code_bug_waste", "test_restart_reliability", "test_overhead"),
    "test_benchmarks_node_loss.py": ("one_row_of_ours",),
    "test_copier.py": ("[kubeflow", "the_agent_pins"),
    "test_tiers.py": (
        "[nab]",
        "[damaged]",
        "started_again",
        "from_everywhere",
        "replaced_node",
        "copier_is_killed",
        "right_after_a_save",
        "full_local_disk",
    ),
    "test_checkpointer.py": (
        *("lose_nothing_that_was_committed[s3]", "4_then_2_then_3_ranks[s3]", "[wrap0-", "[wrap1-", "[wrap3-", "other_wrappers"),
    ),
    "test_under_the_agent.py": ("[s3]", "told_to_leave"),
    "test_integrations.py": ("told_to_leave", "not_the_best", "in_the_background", "[pytorch_lightning]", "[lightning]"),
    "test_hang.py": (
        *("[loop", "[data", "[never", "[absent", "[stop:1]", "a_starved_worker", "patient", "goes_on_in_a_new_round"),
        *(
            "[c10d",
            "ext_c10d]",
            "barrier_names_who_is_missing[launcher1]",
            "a_long_evaluation_is_no_hang",
            "a_worker_in_a_debugger",
            "is_found_too[faults1]",
        ),
    ),
    "test_standby.py": (
        *("[gloo-8]", "[ddp-2]", "[fsdp-2]", "leave_nothing_behind", "that_a_module_of_the_script_sets", "are_replaced"),
        "the_end_of_a_job",
        "as_numactl_does_it",
    ),
    "test_supervisor.py": (
        *("comes_back[segv", "comes_back[runtime", "comes_back[exit", "stuck_in_the_kernel", "through_the_api"),
        *("a_restart_that_is_long_ago", "whole_shutdown_timeout[2]", "never_hurts_the_agent[[1]]", "never_hurts_the_agent[xxx"),
        'never_hurts_the_agent[{"message": 0',
        "what_it_resumes_from[agent]",
    ),
    "test_saving.py": ("all_nodes_save[ext_c10d]", "cannot_be[slow", "a_node_saves_first[3]"),
    "test_save_command.py": ("overlap", "time_is_over", "a_round_that_ends"),
    "test_etcd_failures.py": (
        *("[for etcd", "verdict[key:1]", "is_not_charged[agent-2", "is_not_charged[torchrun-15", "its_own_node_does[2-"),
    ),
    "test_etcd_jobs.py": ("etcd_down_for_longer",),
    "test_c10d.py": ("a_failure_on_one_node_restarts_both",),
    "test_etcd_outages.py": (
        *("clocks_that_jump", "restart_nothing[follower]", "restart_nothing[leader]", "until_it_has_room[other]"),
        *("joins_again", "may_no_longer_write"),
    ),
    "test_c10d_failures.py": (
        *("may_come_back", "of_the_store_stays", "outlives_an_agent", "without_the_store", "waits_for_a_place"),
        *("closes_nothing_and_is_not_waited_for", "crash_twice", "costs_the_job_one_restart"),
        *("the_budget_is_the_jobs", "stops_the_healthy_ones_too[a]", "costs_nobody_the_verdict[True"),
        "slow_to_tell",
    ),
    "test_readme.py": ("losses_of_the_demo",),
    "test_lost_records.py": (
        *(
            "-20-",
            "-60-",
            "-180-",
            "-10]",
            "etcd-5-2",
            "links-8-2",
            "link-5-2",
            "link-8-2",
            "agents-8-2",
            "costs_one_free_restart",
        ),
    ),
    "test_strangers.py": (
        *("[ext_c10d]", "loopback_only[torchrun]", "loopback_only[function]", "loopback_only[ext_etcd]"),
        "loopback_only[two agents]",
    ),
    "test_plain.py": ("restarts_it", "both_restart[ext_c10d]", "is_lost[ext_c10d]"),
    "test_starts.py": (
        *("limit[on]", "[no_pidfd]", "nr_inodes=24", "[no.such", "[192.0.2.1-1]", "test_standbys_without", "[96-32]"),
        *("of_another_host_on_etcd", "stderr_of_a_worker", "delay_the_end[relay"),
    ),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long ones only with ELASTIC_EXT_TEST_LONG=1, and then nothing else; a test that is named by its id is always run."""
    if any("::" in each for each in config.args):
        return
    wanted = os.environ.get("ELASTIC_EXT_TEST_LONG") == "1"
    others = [item for item in items if any(part in item.name for part in LONG.get(item.path.name, ())) != wanted]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
