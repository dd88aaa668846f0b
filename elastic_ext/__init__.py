"""elastic_ext: a plug-in for stock torchrun that decides what a failure means before it restarts anything.

Importing this package imports no torch: the entry point is loaded by every torchrun on the machine, selected or not.
"""

__version__ = "0.1.0"
