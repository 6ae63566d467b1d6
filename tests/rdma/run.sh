#!/usr/bin/env bash
# Goal: the rdma transport keeps its promises on real verbs devices. Method: the conformance suite and tests/rdma.rs over
# soft-RoCE, four rails, in one boot of a VM (vm.sh).
# Without QEMU and its friends it says what is missing and ends well, but in CI that is a failure.
set -euo pipefail
cd "$(dirname "$0")/../.."
packages="qemu-system-x86 busybox-static cpio kmod iproute2 xz-utils rdma-core ibverbs-utils libibverbs-dev"

missing=()
for tool in qemu-system-x86_64 busybox cpio modprobe rdma xz ibv_devices; do
  PATH=$PATH:/sbin:/usr/sbin type -P $tool >/dev/null || missing+=("$tool")
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "test-rdma: not run: ${missing[*]} missing: apt-get install $packages"
  [ "${CI:-}" != true ]
  exit
fi

# The declarations of libibverbs against its header: needs no device.
cargo test --quiet --package pyengine-transfer --lib transport::rdma::verbs

# Built here, run there; optimized, as the VM is emulated and slow enough.
tests=$(cargo test --release --quiet --no-run --package pyengine-transfer --test conformance --test rdma \
  --message-format=json | sed -n 's/.*"name":"\(conformance\|rdma\)".*"executable":"\([^"]*\)".*/\1=\2/p')
conformance= rdma=
for entry in $tests; do
  case $entry in
    conformance=*) conformance=${entry#*=} ;;
    rdma=*) rdma=${entry#*=} ;;
  esac
done
for test in "$conformance" "$rdma"; do [ -x "$test" ] || { echo "test-rdma: a test was not built"; exit 1; }; done

# One after another: they share the rails. PYENGINE_TEST_RDMA: no device is a failure, not a reason to skip.
export PYENGINE_TEST_RDMA=required PATH=$PATH:/sbin:/usr/sbin
exec tests/rdma/vm.sh -n 4 -t "${RDMA_SECONDS:-900}" bash -c "
  set -e
  '$conformance' --test-threads 1 --include-ignored rdma::
  '$rdma' --test-threads 1 ${RDMA_FLAGS:-}"
