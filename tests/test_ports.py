"""No two processes of the tests have the same port, whether somebody listens on it or not."""

import os
import subprocess
import sys
import tempfile

import pytest

from tests.ports import free_port

CODE = "import sys; from tests import ports; print(ports._is_free(int(sys.argv[1])))"


@pytest.mark.full
def test_a_port_stays_its_process_s_own():
    port = free_port()
    assert subprocess.check_output([sys.executable, "-c", CODE, str(port)], text=True) == "False\n"


AS_ANOTHER_USER = """
import os, pathlib
from tests import ports
source = pathlib.Path(ports.__file__).read_text()
os.seteuid(65534)
exec(source)
"""


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_user_s_locks_are_in_nobody_s_way():
    with tempfile.TemporaryDirectory() as shared:
        os.chmod(shared, 0o1777)
        subprocess.run([sys.executable, "-c", AS_ANOTHER_USER], env={**os.environ, "TMPDIR": shared}, check=True)
