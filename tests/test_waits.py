"""Every pause of a fixed length, by where it is.

In the package none may lie between a death and the next collective. In tests a pause is a lower bound: nothing has to happen
within it. Tests wait with `until` for what no event reports; a limit that a test shortens is one whose expiry the test is about.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import elastic_ext

PACKAGE = Path(elastic_ext.__file__).parent
TESTS = Path(__file__).parent
WHY = {
    "checkpoints/copying/replicate.py:wait_to_send": "the copy's bandwidth is bounded",
    "checkpoints/memory/mirror.py:_send": "the bandwidth of copies is bounded",
    "checkpoints/storage.py:poll": "a storage tells of no change",
    "cli/status.py:_watch": "nothing tells a command of changes in an agent; every 2 s, as the page does",
    "embedded/hosting.py:await_addresses": "nothing tells when a name server has learned of a name",
    "embedded/service.py:look_after_leases": "a lease ends when its time is over",
    "embedded/snapshot.py:keep": "nothing tells when a disk has room again",
    "embedded/process.py:_end_strangers": "nothing tells of connections that gRPC has taken, or of their silence",
    "rendezvous/running_job.py:_await_answer": "nothing tells when somebody begins to listen",
    "rendezvous/presence.py:_look": "nothing tells when etcd stops answering this node; a second, after a reset",
    "rendezvous/links.py:_confirm": "a dead node does not answer; only the end of the time tells so",
    "rendezvous/links.py:watch": "a host that cannot be reached tells nothing when it can again",
    "features/hangs/flight_recorder.py:dump": "a file of another process; only when all workers hang",
    "workers/processes.py:poll": "under a tracer a process ends before its parent learns of it",
    "workers/standby/client.py:_reap_group": "nothing tells that the last process has left a group; after a standby server's end",
    "workers/reaper.py:wait": "where there are no pidfds nothing tells of the end of a stranger",
    "workers/reaper.py:_kill_all": "a child between fork and exec; the agent is dead by then",
}


WHY_IN_TESTS = {
    "chaos/kills/campaign.py:_await_save": "only what the job writes tells that a save has begun; a kill is to hit it",
    "chaos/kills/campaign.py:_await_moment": "when it kills is random",
    "chaos/kills/campaign.py:_kill_ranks": "as above",
    "chaos/kills/campaign.py:_train_and_kill": "as above",
    "chaos/kills/apart.py:_await_moment": "when it kills is random",
    "chaos/kills/apart.py:_strike": "as above",
    "chaos/kills/local.py:_await": "only the files of the job tell that a copy or a removal has begun; a kill is to hit it",
    "chaos/kills/local.py:_await_moment": "when it kills is random",
    "chaos/kills/local.py:_strike": "as above",
    "checkpoints/memory/test_part.py:test_other_threads_run_while_a_buffer_is_made": "0: lets go of Python's lock",
    "conftest.py:__init__": "the guard replaces it",
    "etcd/test_security.py:await_expiry": "each look prolongs the token; repeated until it has expired",
    "etcd/test_security.py:has_expired": "as above",
    "rendezvous/test_links.py:instead_of_pauses": "replaces the pauses of the package",
    "rendezvous/test_links.py:pause": "as above",
    "until.py:until": "the one poll of the tests",
}


def test_nothing_waits_for_time_to_pass():
    assert set(pauses(PACKAGE)) == WHY.keys()


def test_no_test_waits_for_time_to_pass():
    assert {each for each in pauses(TESTS) if not each.startswith("scripts/")} == WHY_IN_TESTS.keys()


def pauses(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(
                is_pause(node) for node in ast.walk(function)
            ):
                yield f"{path.relative_to(folder)}:{function.name}"


def is_pause(node: ast.AST) -> bool:
    """time.sleep, called or handed on; select of nothing; waiting for an event that nobody can set."""
    text = ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute, ast.Call)) else ""
    return text in ("sleep", "time.sleep", "asyncio.sleep") or text.startswith(
        ("select.select([], [], []", "select.poll().poll(", "threading.Event().wait(")
    )
