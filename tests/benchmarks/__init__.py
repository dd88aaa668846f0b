import sys

from tests.jobs import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))  # they are scripts, not a package
