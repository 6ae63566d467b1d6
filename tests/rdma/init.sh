#!/bin/busybox sh
# First process of the VM (see vm.sh): mounts, makes the devices, runs the command, reboots.
/bin/busybox --install -s /bin
export PATH=/bin
fail() { echo "rdma vm: set-up failed: $*"; reboot -f; }
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev
while read -r module; do insmod "/lib/$module" || fail "insmod $module"; done </order
p9=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o $p9 xfer /xfer && . /xfer/config || fail "mount xfer"
mount -t 9p -o ro,cache=loose,$p9 host /host || fail "mount host"
mount -t tmpfs -o size=75% tmpfs /rw; mkdir /rw/up /rw/work
mount -t overlay -o lowerdir=/host,upperdir=/rw/up,workdir=/rw/work overlay /new || fail "mount overlay"
mount -t proc proc /new/proc; mount -t sysfs sysfs /new/sys; mount -t devtmpfs dev /new/dev
mkdir -p /new/run /new/tmp /dev/shm /dev/pts; mount -t tmpfs tmpfs /new/run
mount -t tmpfs tmpfs /new/dev/shm; mount -t devpts devpts /new/dev/pts
ln -s /proc/self/fd /dev/fd; ln -s fd/0 /dev/stdin; ln -s fd/1 /dev/stdout; ln -s fd/2 /dev/stderr
hostname rdma-vm; ulimit -l unlimited
# Each rail is one end of a veth pair in a bridge. Table 100 sends packets between two rails over the bridge, not over
# lo, where rxe would drop them; packets of a rail to itself stay inside rxe.
for k in accept_local=1 arp_ignore=1 arp_announce=2; do echo "${k#*=}" >/proc/sys/net/ipv4/conf/all/${k%=*}; done
all=$(seq 0 $((rails - 1)))
{ echo "link set lo up"; echo "link add br0 mtu 9000 type bridge"; echo "link set br0 up"
  echo "rule add pref 20 lookup local"; echo "rule del pref 0"
  for n in $all; do
    echo "link add rail$n mtu 9000 type veth peer name port$n mtu 9000"; echo "link set port$n master br0 up"
    echo "link set rail$n up"; echo "addr add 10.99.$n.1/24 dev rail$n"
    echo "rule add pref 10 oif rail$n to 10.99.0.0/16 lookup 100"
    for m in $all; do
      [ "$m" = "$n" ] || echo "route add 10.99.$m.1 dev rail$n src 10.99.$n.1 metric $((n + 1)) table 100"
    done
  done; } | chroot /new /bin/ip -batch - || fail ip
for n in $all; do chroot /new /usr/bin/rdma link add "rxe$n" type rxe netdev "rail$n" || fail "rdma link add rxe$n"; done
cp /xfer/run /new/run/command
{ { chroot /new /bin/bash /run/command </dev/null 2>&3; echo $? >/xfer/status # then end what it left running
    for p in /proc/[0-9]*; do [ "$(readlink "$p/root")" = /new ] && kill -9 "${p#/proc/}"; done 2>/dev/null
  } | cat >"$(echo /dev/vport*p1)"; } 3>&1 | cat >"$(echo /dev/vport*p2)"
reboot -f
