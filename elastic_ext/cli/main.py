"""`elastic-ext`: the commands beside torchrun. It imports neither torch nor an agent, so it starts fast and anywhere."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from typing import Any, NoReturn

import elastic_ext
from elastic_ext.base import errors, log_records, printable
from elastic_ext.cli import checkpoints, plan, print_error, requests, status, timeline


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Returns:
        0; 78 for wrong usage or input, with one line on stderr for each error; 1 if `checkpoints verify` or `cp` found
        damage; 75 if `checkpoints save` got no save; `status` and `drain` have codes of their own (their MEANINGS).
    """
    log_records.install(plain=True)
    try:
        args = parser().parse_args(argv)
        return int(args.run(args))
    except errors.UsageError as error:
        print_error(str(error))
        return errors.EX_CONFIG
    except BrokenPipeError:  # the reader of our output closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def command() -> NoReturn:
    """Run a command, and end this process with its exit code at once: a thread of gRPC has held up an end in the usual way."""
    if isinstance(sys.stdout, TextIOWrapper):  # what this locale has no character for is escaped, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    code = main()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = 0
    sys.stderr.flush()
    os._exit(code)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets `run` to the function that runs it."""
    options = _Parser(prog="elastic-ext", description="Tools for jobs that run under elastic_ext.")
    options.add_argument("--version", action="version", version=f"elastic_ext {elastic_ext.__version__}")
    options.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print the completion script for this shell; needs shtab",
    )
    commands = options.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)
    status.add_explain(commands)
    status.add_command(commands)
    timeline.add_command(commands)
    requests.add_command(commands)
    plan.add_command(commands)
    checkpoints.add_command(commands)
    examine = commands.add_parser("doctor", help="check whether a job could run here, and what it would learn about failures")
    examine.description = (
        "Check torch, the entry point, the agent, warm standbys, etcd, checkpoint_dir, the metrics port, sources of evidence "
        "(cgroups, kernel log, GPU driver, platform) and limits. Starts no job and leaves nothing behind. The exit code is 78 "
        "if a check fails, else 0."
    )
    examine.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT[,...]", default="", help="etcd servers to check as well, or job:... as for torchrun"
    )
    examine.add_argument("--rdzv-conf", metavar="KEY=VALUE[,...]", default="", help="settings, as for torchrun")
    examine.add_argument("--json", action="store_true", help="print JSON")
    examine.add_argument(
        "--preflight",
        action="store_true",
        help="measure instead: devices, memory, disks, checkpoint_dir; started by srun or torchrun on several nodes, also "
        "all_reduce of each two of them. Fails with an error, or a figure much worse than the median of its peers",
    )
    examine.add_argument(
        "--alone",
        action="store_true",
        help="with --preflight: measure this node only, and not checkpoint_dir, which nodes share; exit with 69 if its hardware "
        "is bad",
    )
    examine.set_defaults(run=_doctor)
    return options


class _Parser(argparse.ArgumentParser):
    """A parser that exits with 78 for wrong usage, like the rest of this project, not with argparse's 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(errors.EX_CONFIG, printable.shown(f"{self.prog}: {message}; see {self.prog} --help") + "\n")


class _PrintCompletion(argparse.Action):
    """Prints the completions for a shell, and exits. Raises UsageError."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: Any, option_string: str | None = None) -> None:
        try:
            import shtab
        except ImportError as error:
            raise errors.UsageError(f"--print-completion needs shtab: pip install 'elastic_ext[completion]' ({error})") from error
        _complete_paths(parser, {"FILE": shtab.FILE, "EVENTS": shtab.FILE, "DIR": shtab.DIRECTORY})
        print(shtab.complete(parser, values))
        parser.exit()


def _complete_paths(parser: argparse.ArgumentParser, by_metavar: Mapping[str, object]) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_paths(each, by_metavar)
        elif isinstance(action.metavar, str) and action.metavar in by_metavar:
            action.complete = by_metavar[action.metavar]  # type: ignore[attr-defined]  # shtab's way to say so


def _doctor(args: argparse.Namespace) -> int:
    from elastic_ext.cli import doctor, preflight  # imported here, because no other command needs their imports

    if args.alone and not args.preflight:
        raise errors.UsageError("doctor: --alone needs --preflight")
    return preflight.run(args) if args.preflight else doctor.run(args)
