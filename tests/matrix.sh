#!/usr/bin/env bash
# The short suite on several versions of torch and Python: tests/matrix.sh [TORCH:PYTHON ...]
# Each gets an environment of its own under $MATRIX_DIR (.matrix by default), gigabytes each, kept for the next time. Torch is the
# build for CPUs where pip finds one; else that for CUDA, without the libraries that its import does not need.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${MATRIX_DIR:-.matrix}
suite=(tests/agent/test_plugin.py tests/agent/test_supervisor.py tests/rendezvous/test_etcd_jobs.py tests/agent/test_main.py tests/workers/test_bootstrap.py tests/workers/standby/test_standby.py)
[ $# -gt 0 ] || set -- 2.8:3.10 2.10:3.11 2.12:3.12 2.14:3.13 newest:3.13

# What pip is to install for a series of versions, such as 2.14.
wanted() { # $1: series, $2: python
  local cpu
  cpu=$("$2" -m pip index versions torch 2>/dev/null | grep -oE "\\b${1//./\\.}(\\.[0-9]+)*\\+cpu" | head -1) || true
  echo "torch==${cpu:-$1.*}"
}

# Have pip leave out what none of the libraries of torch 2.14 is linked to (`readelf -d`): 0.45 GB of 2.4.
lighten() { # $1: METADATA of torch
  sed -i -E -e '/^Requires-Dist: (triton|cuda-bindings)\b/d' -e '/^Requires-Dist: cuda-toolkit\[/ s/,?\b(cusolver|nvtx)\b//g' "$1"
}

for pair in "$@"; do
  torch=${pair%%:*} python=python${pair##*:}
  "$python" -c "" 2>/dev/null || { echo "matrix: no $python on this machine, torch $torch runs on python3"; python=python3; }
  env=$dir/$torch
  if [ ! -e "$env/.ready" ]; then
    "$python" -m venv "$env"
    [ "$torch" = newest ] && build=torch || build=$(wanted "$torch" "$env/bin/python")
    "$env/bin/python" -m pip install --quiet --no-deps "$build"
    lighten "$env"/lib/python*/site-packages/torch-*.dist-info/METADATA
    "$env/bin/python" -m pip install --quiet --editable '.[test]'
    touch "$env/.ready"
  fi
  "$env/bin/python" -c 'import platform, torch; print("matrix: torch", torch.__version__, "python", platform.python_version())'
  "$env/bin/python" -m pytest -q -n 2 -p no:cacheprovider "${suite[@]}"
done
