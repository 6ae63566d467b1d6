#!/usr/bin/env bash
# Goal: the rdma transport keeps its promises on real verbs devices, and serving works over it. Method: over soft-RoCE,
# four rails, in one boot of a VM (vm.sh): the conformance suite, tests/rdma.rs, transferd's commands, `pyengine serve` with
# the fake backend and, for one small prompt, with the real model.
# Without QEMU and its friends it says what is missing and ends well, but in CI that is a failure.
#
# RDMA_SECONDS: limit for the VM.
set -euo pipefail
cd "$(dirname "$0")/../.."

missing=()
for tool in qemu-system-x86_64 busybox cpio modprobe rdma xz ibv_devices; do
  PATH=$PATH:/sbin:/usr/sbin type -P $tool >/dev/null || missing+=("$tool")
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "test-rdma: not run: ${missing[*]} missing: apt-get install $(cat tests/rdma/packages)"
  [ "${CI:-}" != true ]
  exit
fi

# The declarations of libibverbs against its header: needs no device.
cargo test --quiet --package pyengine-transfer --lib transport::rdma::verbs

# Built here, run there; optimized, as the VM is emulated and slow enough.
declare -A built=()
while read -r name program; do built[$name]=$program; done < <(
  cargo test --release --quiet --no-run --package pyengine-transfer --package transferd \
    --test conformance --test rdma --test commands --message-format=json |
    sed -n 's/.*"name":"\(conformance\|rdma\|commands\)".*"executable":"\([^"]*\)".*/\1 \2/p')
for test in conformance rdma commands; do
  [ -x "${built[$test]:-}" ] || { echo "test-rdma: $test was not built"; exit 1; }
done

# The VM throws away what it writes: so what is computed only once, bytecode (half of Python's start there) and the
# oracle's answers, is made here.
python=$PWD/.venv/bin/python
export PYTHONPYCACHEPREFIX=$PWD/target/pycache
unset PYTHONDONTWRITEBYTECODE
$python -c "import pytest_timeout, pytest_asyncio, pyengine._transferd, pyengine.launch, pyengine.gateway.app
import pyengine.scheduler.service, pyengine.worker.service, pyengine.backends.fake, tests.system.test_serve
import pyengine.backends.torch, tests.oracle as it, tests.system.test_oracle
from pyengine.checkpoint import resolve
it.load()
resolve('smollm2', it.MODELS)"

# One after another: they share the rails. PYENGINE_TEST_RDMA: no device is a failure, not a reason to skip.
export PYENGINE_TEST_RDMA=required PATH=$PATH:/sbin:/usr/sbin
seconds=${RDMA_SECONDS:-1500}
exec tests/rdma/vm.sh -n 4 -t "$seconds" bash -c "
  set -e
  '${built[conformance]}' --test-threads 1 --include-ignored rdma::
  '${built[rdma]}' --test-threads 1 ${RDMA_FLAGS:-}
  '${built[commands]}' --test-threads 1 --ignored --nocapture rdma
  $python -m pytest -p no:cacheprovider -p no:xdist -p no:hypothesispytest --timeout $seconds -k rdma tests/system/test_serve.py \
    tests/system/test_oracle.py"
