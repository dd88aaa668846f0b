"""`python -m elastic_ext.agent`: torchrun with our agent and the embedded rendezvous. It takes every torchrun option."""

# No __future__ import: nothing may be imported before sys.path is in order.
import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", sys.flags.isolated):
    # `-m` has put the working directory first: a queue.py in it would be imported in place of Python's own.
    _here = sys.path.pop(0)
    from elastic_ext.base import isolated

    isolated.search_last([_here])

if __name__ == "__main__":
    import os as _os

    from elastic_ext.agent import plugin
    from elastic_ext.workers import limits

    plugin.explain_early_ends()
    limits.mend_start()
    if any("job:" in each for each in (*sys.argv, _os.environ.get("PET_RDZV_ENDPOINT", ""))):
        from elastic_ext.own_etcd import launch

        launch.begin_early(sys.argv[1:], _os.environ)  # while torch is imported

import logging
import os
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

from elastic_ext.agent import exits, plugin
from elastic_ext.base import errors, log_records
from elastic_ext.base.errors import EX_FAILED
from elastic_ext.failures.policy import NO_LIMIT

BACKEND = "ext_c10d"
LOCAL_ENDPOINT = "localhost:0"


def parser() -> ArgumentParser:
    """Return torchrun's parser with our defaults; PET_* variables win over these, as they do over torchrun's."""
    if os.environ.get("PET_STANDALONE") == "":  # so says Kubeflow's training operator; torchrun expects a number
        os.environ["PET_STANDALONE"] = "1"
    options: ArgumentParser = torchrun.get_args_parser()
    options.prog = "python -m elastic_ext.agent"
    options.description = (
        "torchrun with elastic_ext's agent; every torchrun option works. Without --rdzv-* it runs on this machine only."
    )
    for name, default in (("rdzv_backend", BACKEND), ("rdzv_endpoint", LOCAL_ENDPOINT)):
        if f"PET_{name.upper()}" not in os.environ:
            options.set_defaults(**{name: default})
    return options


def settle(args: Namespace) -> Namespace:
    """Translate options that torchrun's own launcher would refuse or send elsewhere.

    Raises UsageError: there are no workers to start, or an option has an impossible value.
    """
    if args.standalone:
        args.standalone = False
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = BACKEND, LOCAL_ENDPOINT, str(uuid.uuid4())
    if args.rdzv_backend == BACKEND and args.rdzv_endpoint == LOCAL_ENDPOINT:
        _settle_place(args)
    if args.max_restarts < NO_LIMIT:
        raise errors.UsageError(f"--max-restarts={args.max_restarts}: expected 0 or more, or -1 for no limit")
    if args.max_restarts == NO_LIMIT:  # torchrun itself refuses it
        args.max_restarts = 0
        args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, f"max_restarts={NO_LIMIT}"]))
    try:
        workers, nodes = torchrun.determine_local_world_size(args.nproc_per_node), torchrun.parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError) as error:
        raise errors.UsageError(f"--nproc-per-node={args.nproc_per_node} --nnodes={args.nnodes}: {error}") from error
    if workers < 1:
        raise errors.UsageError(f"--nproc-per-node={args.nproc_per_node}: expected 1 worker or more; nothing was started")
    if not 1 <= nodes[0] <= nodes[1]:
        raise errors.UsageError(f"--nnodes={args.nnodes}: expected MIN or MIN:MAX with 1 <= MIN <= MAX; nothing was started")
    return args


def _refuse_completion(argv: Sequence[str]) -> None:
    """Raise UsageError for an option of newer versions of torch, whose output would be for the command `python`."""
    if argv and argv[0].partition("=")[0] == "--print-completion":
        raise errors.UsageError(
            "--print-completion: a shell completes a command by its name, and `python -m` gives this one none; expected "
            "`torchrun --print-completion SHELL` of a newer torch, which has the same options"
        )


def _settle_place(args: Namespace) -> None:
    """Distinguish a job on this machine alone from one whose nodes meet where an operator says (see `address.endpoint_of`)."""
    if os.environ.get("PET_MASTER_ADDR") and str(args.nnodes).rpartition(":")[2] != "1":
        args.rdzv_endpoint = ""
    elif args.rdzv_id == "none":
        args.rdzv_id = str(uuid.uuid4())


def _configure_logging() -> None:
    """Show our own log from INFO up. Show that of other libraries from LOGLEVEL up (WARNING by default), as torch does."""
    level = os.environ.get("LOGLEVEL", "").upper()
    log_records.configure(level or "WARNING")
    logging.getLogger("elastic_ext").setLevel(level or "INFO")


@record  # type: ignore[untyped-decorator, unused-ignore]
def _run(args: Namespace) -> None:
    torchrun.run(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job and return the exit code of the command: 78 for wrong usage, else see `failures.policy` and `agent.exits`."""
    _configure_logging()
    plugin.explain_early_ends()
    with errors.usage_errors_exit():
        _refuse_completion(sys.argv[1:] if argv is None else argv)
        args = settle(parser().parse_args(argv))
        plugin.check_host()  # before torch makes a directory for logs
    # A checkout that is not installed has no entry points; registering the same creator twice is fine.
    rendezvous_handler_registry.register(BACKEND, plugin.ext_c10d())
    try:
        _run(args)
    except (ChildFailedError, SignalException, KeyboardInterrupt) as error:
        code = exits.exit_code_of(error) or EX_FAILED
        exits.say_last(error, code)
        return code
    return 0


if __name__ == "__main__":
    exits.end(main())
