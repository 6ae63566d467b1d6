#!/bin/sh
# Installs what bench/transfer.py, bench/pool.py, bench/index.py and bench/aiperf.py compare with, each in an environment of its own: their dependencies are not ours.
# What cannot be installed says why and is left out of the table.
cd "$(dirname "$0")/../.." || exit 1
PYTHON=${PYTHON:-python3}

# peer NAME REQUIREMENT IMPORT HINT
peer() {
  environment=.venv-peers/$1
  log=$environment.log
  mkdir -p .venv-peers
  if { test -x "$environment/bin/python" || "$PYTHON" -m venv "$environment"; } >"$log" 2>&1 &&
    "$environment/bin/pip" install --quiet --disable-pip-version-check "$2" numpy >>"$log" 2>&1 &&
    "$environment/bin/python" -c "$3" >>"$log" 2>&1; then
    echo "$1: $2"
  else
    echo "$1: left out: $(tail -n 1 "$log") ($4)"
  fi
}

peer mooncake mooncake-transfer-engine-non-cuda==0.3.13.post1 "import mooncake.engine" \
  "its libraries: apt-get install libibverbs1 libnuma1 libcurl4"
peer nixl nixl-cu12==1.5.1 "import nixl_cu12._api" "its wheels are for CPython on glibc"
peer dynamo ai-dynamo-runtime==1.6.1 "from dynamo._core import RadixTree" "its wheels are for CPython on glibc"
peer aiperf aiperf==0.13.0 "import aiperf" "its wheels are for CPython on glibc"
if command -v iperf3 >/dev/null; then echo "iperf3: $(iperf3 --version | head -n 1)"; else
  echo "iperf3: left out: not installed (apt-get install iperf3)"
fi
