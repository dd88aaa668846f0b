"""The agent, which at its end writes the names of those of our modules that it has loaded to the file LOADED."""

import os
import sys
from pathlib import Path

from elastic_ext.agent.__main__ import main

if __name__ == "__main__":
    code = main()
    Path(os.environ["LOADED"]).write_text("\n".join(name for name in sys.modules if name.startswith("elastic_ext.")))
    sys.exit(code)
