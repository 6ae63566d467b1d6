#!/usr/bin/env bash
# Runs a command on a machine with RDMA devices: a small VM with soft-RoCE (rdma_rxe), for hosts whose kernel has none.
#
#   vm.sh [-n RAILS] [-t SECONDS] COMMAND [ARG...]
#     -n RAILS    devices rxe0, rxe1, ... on interfaces rail0, rail1, ... with addresses 10.99.N.1 (default 4)
#     -t SECONDS  limit for the whole run, boot included (default 900); past it the status is 124
#
# Boots Debian's kernel in QEMU, emulated, as containers rarely have KVM (and where /dev/kvm opens, a guest may hang: seen);
# mounts this machine's root over 9p (read-only, under a tmpfs: what the command writes is thrown away), and runs the
# command in a chroot there as root, in the current directory, with the caller's environment. Output and exit status come
# back. 125: the VM or its set-up failed. Time is emulated too: nothing measured in there says anything about performance.
#
# PYENGINE_RDMA_VM_CACHE: kernel and initramfs (default ~/.cache/pyengine-rdma-vm).
set -euo pipefail
die() { echo "rdma vm: $*" >&2; exit 125; }

limit=900 rails=4
while getopts n:t: option; do
  case $option in n) rails=$OPTARG ;; t) limit=$OPTARG ;; *) exit 125 ;; esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || die "no command given"
cache=${PYENGINE_RDMA_VM_CACHE:-$HOME/.cache/pyengine-rdma-vm}

# The kernel is the package that linux-image-amd64 depends on. The bare ELF image inside boots with no BIOS, and saves
# emulating its decompression (6 of 9 s).
unpack_kernel() { # DIRECTORY: leaves vmlinux and lib/modules in it
  local package image offset
  package=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-/ {print $2; exit}')
  [ -n "$package" ] || die "apt knows no linux-image-amd64: run apt-get update (the VM needs Debian's kernel)"
  ls "$cache/$package"_*.deb >/dev/null 2>&1 ||
    (cd "$cache" && apt-get -qq -o APT::Sandbox::User=root download "$package" >&2) ||
    die "no download of $package: run apt-get update"
  dpkg-deb -x "$(ls -t "$cache/$package"_*.deb | head -1)" "$1"
  image=$(ls "$1"/boot/vmlinuz-*)
  offset=$(LC_ALL=C grep -obUaP -m1 '\xfd7zXZ\x00' "$image" | head -1 | cut -d: -f1)
  tail -c +$((offset + 1)) "$image" | xz -dc --single-stream >"$1/vmlinux" 2>/dev/null || true
  [ "$(head -c4 "$1/vmlinux" | tail -c3)" = ELF ] || die "no ELF kernel in $image"
}

build() {
  local tmp top version module
  mkdir -p "$cache"
  tmp=$(mktemp -d)
  top=$tmp/initramfs
  unpack_kernel "$tmp"
  version=$(basename "$tmp"/lib/modules/*)
  depmod -b "$tmp" "$version"
  mkdir -p "$top"/{bin,dev,proc,sys,new,host,rw,xfer,lib}
  cp "$(type -P busybox)" "$top/bin/busybox"
  # Emulated, crc32_generic is faster than crc32_pclmul.
  for module in virtio_pci virtio_console 9pnet_virtio 9p overlay crc32_generic veth bridge sch_netem \
                rdma_rxe ib_uverbs; do
    modprobe -d "$tmp" -S "$version" --show-depends "$module"
  done | awk '$1 == "insmod" && !seen[$2]++ {print $2}' >"$tmp/paths"
  while read -r module; do cp "$module" "$top/lib/"; basename "$module"; done <"$tmp/paths" >"$top/order"
  cp "$(dirname "${BASH_SOURCE[0]}")/init.sh" "$top/init"
  chmod +x "$top/init"
  (cd "$top" && find . | cpio -o -H newc --quiet | gzip -1) >"$tmp/initramfs.gz"
  # Renamed into place, so that two runs at once do no harm.
  cp "$tmp/vmlinux" "$cache/vmlinux.$$"; cp "$tmp/initramfs.gz" "$cache/initramfs.$$"; rm -rf "$tmp"
  mv "$cache/vmlinux.$$" "$cache/vmlinux"; mv "$cache/initramfs.$$" "$cache/initramfs.gz"
}
here=$(dirname "${BASH_SOURCE[0]}")
{ [ -e "$cache/vmlinux" ] && [ "$cache/initramfs.gz" -nt "${BASH_SOURCE[0]}" ] &&
  [ "$cache/initramfs.gz" -nt "$here/init.sh" ]; } || build

# The folder xfer is shared with the guest both ways; stdout and stderr come through two FIFOs.
run=$(mktemp -d) qemu=
trap '[ -z "$qemu" ] || kill $qemu 2>/dev/null; rm -rf "$run"' EXIT
trap 'exit 130' INT TERM HUP
mkdir "$run/xfer"
mkfifo "$run/out" "$run/err"
cat "$run/out" & out=$!
cat "$run/err" >&2 & err=$!
echo "rails=$rails" >"$run/xfer/config"
{ declare -px; printf 'cd %q && exec' "$PWD"; printf ' %q' "$@"; echo; } >"$run/xfer/run"
shares=() vm=0
share() {
  shares+=(-fsdev "local,id=$1,path=$2,security_model=none,multidevs=remap$3"
           -device "virtio-9p-pci,fsdev=$1,mount_tag=$1")
}
share host / ,readonly=on
share xfer "$run/xfer" ""
timeout -k 5 "$limit" qemu-system-x86_64 -M q35 -accel tcg,thread=multi -cpu max,la57=off -m 4096 -smp 2 \
  -nodefaults -no-user-config -display none -no-reboot -serial "file:$run/console" \
  -kernel "$cache/vmlinux" -initrd "$cache/initramfs.gz" \
  -append "console=ttyS0 loglevel=5 panic=-1 oops=panic mitigations=off nokaslr" "${shares[@]}" \
  -device virtio-serial-pci \
  -chardev "file,id=out,path=$run/out" -device virtserialport,chardev=out \
  -chardev "file,id=err,path=$run/err" -device virtserialport,chardev=err </dev/null >&2 & qemu=$!
wait $qemu || vm=$?
qemu=
exec 8<>"$run/out" 9<>"$run/err"; exec 8>&- 9>&-  # lets the two cats end even if QEMU never started
wait $out $err || true
[ $vm -ne 124 ] && [ $vm -ne 137 ] || { echo "rdma vm: time limit of $limit s reached" >&2; exit 124; }
[ ! -s "$run/xfer/status" ] || exit "$(cat "$run/xfer/status")"
tail -40 "$run/console" >&2 || true
die "the VM ended with no exit status (qemu: $vm)"
