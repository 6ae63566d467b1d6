"""Who does well, as samples: the conductor hears of everybody, so it is who can tell. Pure."""

from __future__ import annotations

from .cluster import Cluster

#: Seconds for which somebody who went without a word is told as missing. Whoever has not come back by then was taken
#: away for good; a health check that fails for ever would be switched off.
MISSED_FOR = 600.0


def samples(cluster: Cluster, now: float) -> dict[str, float]:
    """By Prometheus sample name: 1 for who is there, 0 for who is missing; and for how long loops have stood still.

    A worker's loop turns every second at least (`WorkerAlive`), so what stands still for longer computes one long step,
    or hangs. Who said goodbye is not missed.
    """
    told: dict[str, float] = {}
    for name, worker in cluster.workers.items():
        label = f'{{worker="{name}"}}'
        if worker.alive:
            told[f"pyengine_worker_up{label}"] = 1
            told[f"pyengine_worker_stalled_seconds{label}"] = max(now - worker.turned, 0.0)
        elif not worker.left and now - worker.heard < MISSED_FOR:
            told[f"pyengine_worker_up{label}"] = 0
    for name, daemon in cluster.daemons.items():
        if daemon.up or (not daemon.draining and now - daemon.heard < MISSED_FOR):
            told[f'pyengine_node_up{{node="{name}"}}'] = int(daemon.up)
    return told
