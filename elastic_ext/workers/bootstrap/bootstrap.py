"""The program that the agent starts in place of the user's script: `python -u bootstrap.py [-m] SCRIPT ARGS...`.

It runs the script as `__main__` the way `python -u [-m] SCRIPT ARGS...` does. These files do the work:

    runner.py                finds and runs the script as the interpreter does, counts its optimizer steps, reports to the agent,
                             dumps stacks on a signal
    replicas.py              hashes what the worker holds as a replica of other ranks, if the agent asks for that
    saves.py, writers.py     note what the script saves, if the agent asks for that
    remote_saves.py          the same below a URL
    error_file.py            writes the exception that ends the script into the error file
    ../worker_env.py         the agent's message to the worker
    ../progress_layout.py    the memory that the worker shares with the agent

The interpreter that starts this file may not have elastic_ext. So these files are loaded by path and use only the standard
library. Before the script runs, they import only modules that every interpreter loads at start or that are written in C, so the
script's own `json.py` or `signal.py` is still found. They get no names in sys.modules.

The interpreter compiles its main file at every start. So this file is short, and the others are loaded from their cached
bytecode. Together they cost 2 ms per start; a single file cost 6 ms.

A script can still notice two stack frames below its own: it can recurse two calls less deep, and `sys._getframe` or a warning's
stacklevel can walk into them.
"""

import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # Python 3.10 has only -I
        del sys.path[0]  # the directory of this file: nothing may be imported from it by its short name
    try:
        import atexit
        from _frozen_importlib_external import SourceFileLoader

        _path = __file__.rpartition("/")[0] + "/runner.py"
        _runner = type(sys)("elastic_ext_runner")
        _runner.__file__ = _path
        exec(SourceFileLoader(_runner.__name__, _path).get_code(_runner.__name__), _runner.__dict__)  # type: ignore[arg-type]

        del sys.orig_argv[-len(sys.argv)]  # this file
        atexit.register(_runner.exit_handlers_are_done)  # the first handler registered is the last to run
        _message = _runner.worker_message()
    except KeyboardInterrupt:
        sys.excepthook = lambda kind, error, _: sys.__excepthook__(kind, error.with_traceback(None), None)
        raise
    _runner.run_as_main(sys.argv[1:], _message)
