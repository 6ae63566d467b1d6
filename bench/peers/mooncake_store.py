"""Mooncake Store over tcp, as its Python wheel gives it: a master, one process whose memory it is, and this one, a client.

Asked line by line (bench/peers/driver.py): {"op": "put"|"get"|"exists", "round": N} -> seconds of that batch. Each round of
puts has names of its own, as a value that is there is not written again; gets and questions are for what an earlier round
has put.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore

from bench.peers.driver import Child, say

COUNT, SIZE = 32, 1 << 20
#: What the store may take: its own eviction begins where it must.
SEGMENT, BUFFER = 512 << 20, 64 << 20


def store(port: int, segment: int, metadata: str, master: str) -> Any:
    made = MooncakeDistributedStore()
    check(made.setup(f"127.0.0.1:{port}", metadata, segment, BUFFER, "tcp", "", master))
    return made


def check(status: int) -> None:
    if status != 0:
        raise SystemExit(f"mooncake: status {status}")


def main(ports: list[int]) -> None:
    rpc, http, metrics, owner_port, port = ports
    metadata, master = f"http://127.0.0.1:{http}/metadata", f"127.0.0.1:{rpc}"
    words = [f"--rpc_port={rpc}", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1"]
    words += ["--enable_http_metadata_server=true", f"--http_metadata_server_port={http}"]
    words += ["--http_metadata_server_host=127.0.0.1"]
    quiet = subprocess.DEVNULL
    master_path = Path(sys.executable).with_name("mooncake_master")
    process = subprocess.Popen([master_path, *words], stdout=quiet, stderr=quiet)
    try:
        # It says nowhere that it is ready.
        time.sleep(2)
        owner = [sys.executable, "-m", "bench.peers.mooncake_store", "owner", str(owner_port), metadata, master]
        with Child(owner) as memory:
            memory.hear()
            serve(store(port, 0, metadata, master))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def serve(client: Any) -> None:
    source = np.random.default_rng(0).integers(0, 256, (COUNT, SIZE), np.uint8)
    target = np.zeros_like(source)
    check(client.register_buffer(source.ctypes.data, source.nbytes))
    check(client.register_buffer(target.ctypes.data, target.nbytes))
    places = {name: [side[row].ctypes.data for row in range(COUNT)] for name, side in (("put", source), ("get", target))}
    say(sys.stdout, "ready")
    for line in sys.stdin:
        question = json.loads(line)
        op, sizes = question["op"], [SIZE] * COUNT
        names = [f"{question['round']} {number}" for number in range(COUNT)]
        begun = time.perf_counter()
        if op == "put":
            outcome = client.batch_put_from(names, places["put"], sizes)
        elif op == "get":
            outcome = client.batch_get_into(names, places["get"], sizes)
        else:
            outcome = client.batch_is_exist(names)
        spent = time.perf_counter() - begun
        good = {"put": 0, "get": SIZE, "exists": 1}[op]
        if any(one != good for one in outcome):
            raise SystemExit(f"mooncake: {op} of round {question['round']}: {outcome}")
        if op == "get":
            assert (source == target).all()
            target.fill(0)
        say(sys.stdout, spent)


def own(port: int, metadata: str, master: str) -> None:
    kept = store(port, SEGMENT, metadata, master)
    say(sys.stdout, "ready")
    sys.stdin.read()
    del kept


if __name__ == "__main__":
    if sys.argv[1] == "owner":
        own(int(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        main([int(word) for word in sys.argv[1:]])
    # Its threads do not end by themselves.
    os._exit(0)
