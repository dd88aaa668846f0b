"""Every pause of a fixed length in the package, by where it is. None may lie between a death and the next collective."""

import ast
from collections.abc import Iterator
from pathlib import Path

import elastic_ext

PACKAGE = Path(elastic_ext.__file__).parent
WHY = {
    "checkpoints/copying/throttle.py:__init__": "the copy's bandwidth is bounded",
    "checkpoints/storage/polling.py:poll": "a storage tells of no change",
    "cli/status.py:_watch": "nothing tells a command of changes in an agent; every 2 s, as the page does",
    "rendezvous/c10d/several_nodes.py:_leave_round": "the backoff that was decided, as on the nodes that failed",
    "rendezvous/etcd/connect.py:_await_answer": "nothing tells when somebody begins to listen",
    "rendezvous/etcd/links/presence.py:_look": "nothing tells when etcd stops answering this node; a second, after a reset",
    "rendezvous/etcd/links/watcher.py:_confirm": "a dead node does not answer; only the end of the time tells so",
    "rendezvous/etcd/links/watcher.py:watch": "a host that cannot be reached tells nothing when it can again",
    "workers/hangs/flight_recorder.py:dump": "a file of another process; only when all workers hang",
    "workers/processes.py:poll": "under a tracer a process ends before its parent learns of it",
    "workers/standby/client.py:_reap_group": "nothing tells that the last process has left a group; after a standby server's end",
    "workers/reaper/reaper.py:wait": "where there are no pidfds nothing tells of the end of a stranger",
    "workers/reaper/reaper.py:_kill_all": "a child between fork and exec; the agent is dead by then",
}


def test_nothing_waits_for_time_to_pass():
    assert set(pauses()) == WHY.keys()


def pauses() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(
                is_pause(node) for node in ast.walk(function)
            ):
                yield f"{path.relative_to(PACKAGE)}:{function.name}"


def is_pause(node: ast.AST) -> bool:
    """time.sleep, called or handed on; select of nothing; waiting for an event that nobody can set."""
    text = ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute, ast.Call)) else ""
    return text in ("sleep", "time.sleep", "asyncio.sleep") or text.startswith(
        ("select.select([], [], []", "select.poll().poll(", "threading.Event().wait(")
    )
