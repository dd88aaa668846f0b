"""The protocol between the agent and the processes of the warm standbys.

Wire protocol, version 1. The agent starts the server (`python -u server.py CONTROL`, with the interpreter, options, environment
and folder of the workers) and talks to it over the socket CONTROL (SOCK_SEQPACKET). Each message from the agent is a JSON object:

    {"version": 1, "preload": PATH}         import what the file at PATH names: a `PreloadRequest` as JSON
    {"version": 1, "park": AGENT} + socket  fork a standby that waits at that socket; AGENT is the pid of the agent
    end of file                             the agent is gone or no longer needs the server: end

The server answers each preload with a packet of one byte and the descriptor of a file that holds a `Ready` as JSON. A server that
gets a message with another version prints that and ends.

Each standby uses its own socket (SOCK_STREAM). In this order:

    standby  its pid in decimal digits: it waits
    agent    HEADER_BYTES with the length of what follows, big-endian, together with the descriptors for the numbers in "open"
    agent    a `Release` as JSON, of that length
    standby  one byte: it runs from here on. An agent that does not get this byte takes another standby.

This file is loaded by path in the server, whose interpreter may not have elastic_ext, so it imports nothing.
"""

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without typing
if TYPE_CHECKING:
    from typing import TypedDict

    class PreloadRequest(TypedDict):
        """
        modules: modules to import, in this order.
        wanted: modules to import after those; the user named them, and they may lie beside the script.
        excluded: modules that other imports must not bring in.
        script_dir: the folder that the workers' interpreter puts first on sys.path.
        program: what the workers run, [SCRIPT, ...] or ["-m", MODULE, ...], for modules that look at sys.argv.
        origins: files of the modules that the workers have imported, by module.
        """

        modules: list[str]
        wanted: list[str]
        excluded: list[str]
        script_dir: str
        program: list[str]
        origins: dict[str, str]

    class Ready(TypedDict):
        """
        seconds: how long the imports took.
        unsafe: modules that must not be imported before the fork, each with the reason; "" stands for libraries.
        absent: modules that cannot be imported, each with the error as "TypeName: message".
        threads: number of threads of the server.
        names: top-level modules that the server has imported, not those of every interpreter or from the script's folder.
        read: variables that were read at import, by requested module.
        changed: variables that imports have set.
        """

        seconds: float
        unsafe: dict[str, str]
        absent: dict[str, str]
        threads: int
        names: list[str]
        read: dict[str, list[str]]
        changed: list[str]

    class Release(TypedDict):
        """
        argv: [SCRIPT, ...] or ["-m", MODULE, ...], to run as `__main__`.
        orig_argv: sys.orig_argv of a cold start.
        shown: the command line to show in /proc.
        env: the worker's environment.
        open: which of 0, 1 and 2 are open in the worker; one descriptor comes for each, in this order.
        processors: the processors to run on; empty: those of the server.
        ignored: mask of ignored signals, like SigIgn in /proc. blocked: numbers of blocked signals.
        """

        argv: list[str]
        orig_argv: list[str]
        shown: list[str]
        env: dict[str, str]
        open: list[int]
        processors: list[int]
        ignored: int
        blocked: list[int]


VERSION = 1
HEADER_BYTES = 4

TOKEN_ENV = "_ELASTIC_EXT_AGENT"
"""A variable of the server and its standbys, not of workers. It holds the agent's token, by which the reaper finds them."""
