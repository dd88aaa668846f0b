"""No two processes of the tests have the same port, whether somebody listens on it or not."""

import subprocess
import sys

import pytest

from tests.ports import free_port

CODE = "import sys; from tests import ports; print(ports._is_free(int(sys.argv[1])))"


@pytest.mark.full
def test_a_port_stays_its_process_s_own():
    port = free_port()
    assert subprocess.check_output([sys.executable, "-c", CODE, str(port)], text=True) == "False\n"
