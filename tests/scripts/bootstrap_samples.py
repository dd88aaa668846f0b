"""Sample scripts for test_bootstrap: each is run by python itself and by the bootstrap, and both must look the same."""

import sys

# Tells all that a script can ask about how it was started. The C modules are those the bootstrap loads when it has settings.
SHOW = """
import sys
print(sys.argv, sys.path, sys.orig_argv, sys.flags)
print("modules", sorted(set(sys.modules) - {"mmap", "faulthandler", "_json", "atexit"}))
print([(name, value) for name, value in globals().items() if name != "__builtins__"], type(__builtins__))
print(__loader__, getattr(__loader__, "__dict__", None), sys._getframe().f_code.co_filename)
import __main__
print(__main__.__dict__ is globals(), sys.modules[__name__] is __main__, sys.excepthook)
import atexit
atexit.register(lambda: print("__file__" in globals(), "__cached__" in globals()))
class Late:
    def __del__(self): print("del", __name__)
late = Late()
"""
MULTIPROCESSING = """
import multiprocessing
class Parcel:
    def __init__(self, text): self.text = text
def work(parcel, queue):
    queue.put((__name__, type(parcel).__module__, parcel.text))
    raise ValueError("in the child")
if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=work, args=(Parcel(method), queue), name="child")
        child.start()
        print(queue.get())
        child.join()
        print(child.exitcode)
"""
HOOK = """
import sys, traceback
def hook(kind, error, trace):
    print(kind, error, sys.excepthook is hook, sys.last_traceback is trace, error.__traceback__ is trace, sys.exc_info())
    traceback.print_tb(trace)
    {then}
sys.excepthook = hook
def fail(): 1 / 0
fail()
"""
THREAD = """
import atexit, threading
atexit.register(print, "registered first")
atexit.register(print, "registered last")
def outlive():
    threading.main_thread().join()
    print("thread ends", "__file__" in globals())
threading.Thread(target=outlive).start()
raise ValueError('end')
"""
SCRIPTS: "dict[str, str | bytes]" = {
    "show.py": SHOW,
    "sub/show.py": SHOW,
    "app/__main__.py": SHOW,
    "package/__init__.py": "",
    "package/__main__.py": SHOW,
    "package/module.py": SHOW,
    "broken/__init__.py": "import no_such_module",
    "broken/module.py": "",
    "plain/__init__.py": "",
    "empty/file": "",
    "shadow/json.py": "",
    "shadow/signal.py": "",
    "shadow/script.py": "import json, signal\nprint(json.__file__, signal.__file__)",
    "torch/__init__.py": "",
    "torch/optim/__init__.py": "from . import optimizer",
    "torch/optim/optimizer.py": "import no_such_module",
    "torch_breaks.py": "import torch.optim.optimizer",
    "cause.py": "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('k') from e",
    "own_type.py": "class A:\n    class B(Exception): pass\nraise A.B('q')",
    "str_raises.py": "class E(Exception):\n    def __str__(self): 1 / 0\nraise E(1)",
    "exit_text.py": "import sys\nsys.exit('bye')",
    "exit_none.py": "import sys\nsys.exit(None)",
    "exit_7.py": "import sys\nsys.exit(7)",
    "exit_tuple.py": "import sys\nsys.exit((1, 2))",
    "sigterm.py": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "interrupt.py": "raise KeyboardInterrupt('x')",
    "generator_exit.py": "raise GeneratorExit('x')",
    "hook.py": HOOK.format(then=""),
    "hook_raises.py": HOOK.format(then="raise OSError('in the hook')"),
    "hook_exits.py": HOOK.format(then="sys.exit(5)"),
    "hook_none.py": "import sys\nsys.excepthook = None\n1 / 0",
    "no_stderr.py": "import sys\nsys.stderr = None\n1 / 0",
    "thread_raises.py": THREAD,
    "thread_fails.py": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T')\nt.start()\nt.join()",
    "multiprocess.py": MULTIPROCESSING,
    "fork.py": "import os\npid = os.fork()\nif not pid: raise ValueError('child')\nprint(os.waitpid(pid, 0)[1])",
    "pickles.py": "import pickle\nclass A: pass\nprint(A, type(pickle.loads(pickle.dumps(A()))))",
    "warns.py": "import warnings\nwarnings.warn('w')\nwarnings.warn('d', DeprecationWarning)",
    "annotated.py": "x: int = 3\nprint(__annotations__, __doc__)",
    "future.py": "'doc'\nfrom __future__ import annotations\ndef f(x: y): pass\nprint(f.__annotations__, __doc__)",
    "latin1.py": b"# coding: latin-1\nprint(ascii('\xe9'))",
    "crlf.py": b"print('''a\r\nb''')\r\n",
    "bad_paren.py": "x = (1,\ny = 2\n",
    "bad_end.py": "if 1:\n",
    "bad_return.py": "return 5",
    "bad_utf8.py": b"x = 1\ny = '\xe9'\n",
    "bad_cookie.py": b"# coding: nosuch\nx = 1\n",
    "bad_null.py": b"x = 1\0\n",
    "bad.pyc": b"abcdefghijklmnopqrstuvwxyz",
}
if sys.version_info >= (3, 11):
    SCRIPTS["group.py"] = "def f(): raise ExceptionGroup('g', [ValueError(1), ExceptionGroup('h', [KeyError('z')])])\nf()"

# How SHOW can be started, one of each kind that Python tells apart; a comma separates arguments.
# fmt: off
WAYS = [
    "show.py", "././show.py", "{here}/show.py", "sub/../show.py", "relative_link.py", "linked_folder/show.py", "app/",
    "linked_app", ".", "app.zip", "compiled.pyc", "compiled_without_suffix", "-m,show", "-m,sub.show", "-m,package",
    "-m,package.module",
]
SAFE_WAYS = ["show.py", "app/", "-m,show"]  # with PYTHONSAFEPATH, which concerns scripts, folders and modules
# What follows from the process that a standby was: its command line, folder, sys.path and modules.
STANDBY_WAYS = ["show.py", "app/", "compiled.pyc", "-m,package.module"]

# What is expected to fail, or to be told apart from what python does by its output only.
ENDS = [
    "missing.py", "show.py/", "empty", "/dev/null", "-m,missing", "-m,package.missing", "-m,broken.module", "-m,plain",
    "-m,show.py", "-m,", "-m,cause", "-m,multiprocess", "-m,bad_paren", "shadow/script.py",
]
ENDS += [name for name in SCRIPTS if "/" not in name and name not in ("show.py", "own_type.py")]
# What follows from the fork: streams, exit handlers, threads, signals, children, and the first import of runpy.
STANDBY_ENDS = [
    "-m,missing", "cause.py", "exit_text.py", "sigterm.py", "interrupt.py", "hook.py", "no_stderr.py", "thread_raises.py",
    "multiprocess.py", "bad_paren.py",
]
# fmt: on
