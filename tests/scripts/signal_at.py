"""An agent that gets a signal as it enters one of its functions; it prints which of some others it enters.

signal_at.py AT SIGNAL WATCHED -- ARGS   AT, WATCHED: MODULE:NAME within elastic_ext, WATCHED several of them with commas between;
                                         ARGS: of the agent. The signal comes once
"""

import functools
import importlib
import signal
import sys

from lines import say

from elastic_ext.agent.__main__ import main

at, number, watched, _, *args = sys.argv[1:]


def before(name: str, action) -> None:
    """Have the function `name` begin with `action`."""
    module, _, path = name.partition(":")
    owner = importlib.import_module(f"elastic_ext.{module}")
    *classes, last = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    function = getattr(owner, last)

    @functools.wraps(function)
    def call(*args, **kwargs):
        action()
        return function(*args, **kwargs)

    setattr(owner, last, call)


left = [signal.Signals[number]]
before(at, lambda: left and signal.raise_signal(left.pop()))
for each in watched.split(","):
    before(each, lambda each=each: say(f"enters {each}"))
sys.argv[1:] = args
sys.exit(main())
