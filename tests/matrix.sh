#!/usr/bin/env bash
# The short suite on several versions of torch and Python: tests/matrix.sh [TORCH:PYTHON ...]
# Each gets an environment of its own under $MATRIX_DIR (.matrix by default), gigabytes each, kept for the next time.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${MATRIX_DIR:-.matrix}
suite=(tests/agent/test_plugin.py tests/agent/test_supervisor.py tests/rendezvous/etcd/test_etcd_jobs.py tests/agent/test_main.py tests/workers/test_bootstrap.py tests/workers/standby/test_standby.py)
[ $# -gt 0 ] || set -- 2.8:3.10 2.10:3.11 2.12:3.12 newest:3.13

for pair in "$@"; do
  torch=${pair%%:*} python=python${pair##*:}
  "$python" -c "" 2>/dev/null || { echo "matrix: no $python on this machine, torch $torch runs on python3"; python=python3; }
  env=$dir/$torch
  if [ ! -e "$env/.ready" ]; then
    [ "$torch" = newest ] && wanted=torch || wanted="torch==$torch.*"
    "$python" -m venv "$env"
    "$env/bin/python" -m pip install --quiet "$wanted" --editable '.[test]'
    touch "$env/.ready"
  fi
  "$env/bin/python" -c 'import platform, torch; print("matrix: torch", torch.__version__, "python", platform.python_version())'
  "$env/bin/python" -m pytest -q -n 2 -p no:cacheprovider "${suite[@]}"
done
