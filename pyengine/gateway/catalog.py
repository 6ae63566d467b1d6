"""Every metric that /metrics shows: what it counts, its type and its labels. docs/metrics.md is made of this table:

    python -m pyengine.gateway.catalog > docs/metrics.md

Names that begin with vllm: mean what they mean in vLLM (its docs/usage/metrics.md), so that its dashboards show this
server. Who sends a sample says who counts: `worker` a worker, `node` a daemon, neither the gateway or the conductor.
"""

from __future__ import annotations

from typing import NamedTuple

#: Seconds. All of vLLM's, so that panels which sum over buckets of both add up, and finer ones where small models are.
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
GAP = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST = (
    *(
        0.01,
        0.025,
        0.05,
        0.1,
        0.2,
        0.3,
        0.5,
        0.8,
        1.0,
        1.5,
        2.0,
        2.5,
        5.0,
        10.0,
        15.0,
        20.0,
        30.0,
        40.0,
        50.0,
        60.0,
        120.0,
    ),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
#: Parts of a first token, in seconds: from a message between processes to a queue of minutes.
PART = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
#: Tokens, 1-2-5 steps up to prompts of two million.
TOKENS = tuple(float(step * 10**power) for power in range(7) for step in (1, 2, 5))[:20]
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


class Family(NamedTuple):
    """One metric. kind: as in `# TYPE`. buckets: of a histogram, upper bounds."""

    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(text: str, *labels: str) -> Family:
    return Family("counter", text, labels)


def _gauge(text: str, *labels: str) -> Family:
    return Family("gauge", text, labels)


def _histogram(buckets: tuple[float, ...], text: str, *labels: str) -> Family:
    return Family("histogram", text, ("model_name", *labels), buckets)


_THEIRS = ("model_name", "worker")

VLLM = {
    "vllm:num_requests_running": _gauge("Requests in a worker's batch", *_THEIRS),
    "vllm:num_requests_waiting": _gauge("Requests that a worker has accepted and not begun", *_THEIRS),
    "vllm:kv_cache_usage_perc": _gauge("Part of a worker's device pages that requests hold; 1: all", *_THEIRS),
    "vllm:prefix_cache_queries_total": _counter("Prompt tokens looked for in a worker's own pages", *_THEIRS),
    "vllm:prefix_cache_hits_total": _counter("Prompt tokens found there", *_THEIRS),
    "vllm:external_prefix_cache_queries_total": _counter("Prompt tokens looked for in the nodes' pools", *_THEIRS),
    "vllm:external_prefix_cache_hits_total": _counter("Prompt tokens found there, in DRAM or on SSD", *_THEIRS),
    "vllm:num_preemptions_total": _counter("Requests that had to give up their pages for a while", *_THEIRS),
    "vllm:cache_config_info": _gauge(
        "Always 1; labels say how a worker keeps KV", "model_name", "worker", "block_size", "num_gpu_blocks"
    ),
    "vllm:prompt_tokens_total": _counter("Tokens of prompts", "model_name"),
    "vllm:prompt_tokens_cached_total": _counter("Tokens of prompts that were found in a cache", "model_name"),
    "vllm:generation_tokens_total": _counter("Tokens generated", "model_name"),
    "vllm:request_success_total": _counter("Requests that were answered to their end", "model_name", "finished_reason"),
    "vllm:time_to_first_token_seconds": _histogram(
        FIRST_TOKEN,
        "From the request's arrival until its first token was shown: all of pyengine_first_token_seconds, and held",
    ),
    "vllm:inter_token_latency_seconds": _histogram(GAP, "Between two tokens; of several that come together, the mean"),
    "vllm:request_time_per_output_token_seconds": _histogram(GAP, "Mean time between the tokens of a request"),
    "vllm:e2e_request_latency_seconds": _histogram(REQUEST, "From a request's arrival to its end"),
    "vllm:request_queue_time_seconds": _histogram(REQUEST, "Until the prefill worker began: conductor and queue"),
    "vllm:request_prefill_time_seconds": _histogram(REQUEST, "From there to the first token"),
    "vllm:request_decode_time_seconds": _histogram(REQUEST, "From the first token to the last"),
    "vllm:request_inference_time_seconds": _histogram(REQUEST, "Prefill and decode"),
    "vllm:request_prompt_tokens": _histogram(TOKENS, "Tokens of a request's prompt"),
    "vllm:request_generation_tokens": _histogram(TOKENS, "Tokens that a request generated"),
    "vllm:request_max_num_generation_tokens": _histogram(TOKENS, "Tokens of the longest of a request's answers"),
    "vllm:request_params_max_tokens": _histogram(TOKENS, "max_tokens as asked for"),
    "vllm:request_params_n": _histogram(CHOICES, "n as asked for"),
}

#: Names of before, under which older dashboards ask for the same samples.
ALIASES = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}

GATEWAY = {
    "pyengine_gateway_requests": _gauge("Requests that this gateway holds", "model_name", "state"),
    "pyengine_request_retries_total": _counter("Attempts beyond the first", "model_name"),
    "pyengine_request_failures_total": _counter(
        "Requests that were not answered to their end", "model_name", "finished_reason"
    ),
    "pyengine_first_token_seconds": _histogram(
        PART, "Parts of the time to the first token: tokenize, schedule, queue, load, prefill, return", "part"
    ),
    "pyengine_handoff_seconds": _histogram(
        PART,
        "Parts of what a decode worker needs for its first token: waited (for the first KV), arriving, loading, "
        "computing; and all: from the first token to the second, as the gateway sees it",
        "part",
    ),
    "pyengine_first_token_held_seconds": _histogram(PART, "For how long a first token waited for the second"),
    "pyengine_second_token_gap_seconds": _histogram(PART, "Between the first and the second token, at the client"),
    "pyengine_gateway_wrong_keys_total": _counter("Requests with a key that is none"),
    "pyengine_gateway_audit_dropped_total": _counter("Lines that the audit log had no room for"),
    "pyengine_tenant_tokens_total": _counter("Tokens of a tenant", "tenant", "kind"),
    "pyengine_tenant_refused_total": _counter("Requests that a limit of their tenant refused", "tenant", "limit"),
    "pyengine_tenant_answers": _gauge("Answers of a tenant under way: n choices are n", "tenant"),
}

CONDUCTOR = {
    "pyengine_worker_up": _gauge("1: it is heard; 0: it went, or fell silent, without a word", "worker"),
    "pyengine_worker_stalled_seconds": _gauge(
        "For how long its loop has not turned: a long step, or it hangs", "worker"
    ),
    "pyengine_node_up": _gauge("1: the node's daemon is heard; 0: it is gone", "node"),
    "pyengine_conductor_plans_total": _counter("Requests that were given workers", "policy"),
    "pyengine_conductor_rejections_total": _counter("Requests that were refused", "reason"),
    "pyengine_conductor_replicated_blocks_total": _counter("Blocks copied because they are hot"),
    "pyengine_conductor_moved_blocks_total": _counter("Blocks moved from nodes that drain"),
    "pyengine_conductor_dropped_blocks_total": _counter("Blocks dropped because others have them"),
    "pyengine_conductor_odd_events_total": _counter("Messages that contradict what is known", "what"),
    "pyengine_conductor_dumps_total": _counter("Dumps of what a node holds that had to be asked for", "cause"),
    "pyengine_conductor_ttft_error": _gauge("Of predicted first tokens: mean relative error"),
    "pyengine_conductor_ttft_bias": _gauge("Of predicted first tokens: mean of predicted over measured, less 1"),
    "pyengine_conductor_tbt_error": _gauge("Of predicted gaps: mean relative error"),
    "pyengine_conductor_tbt_bias": _gauge("Of predicted gaps: mean of predicted over measured, less 1"),
    "pyengine_conductor_length_error": _gauge("Of predicted lengths of answers: mean relative error"),
    "pyengine_conductor_length_bias": _gauge("Of predicted lengths of answers: their bias"),
    "pyengine_conductor_foreseen_requests": _gauge("Requests whose end is predicted"),
    "pyengine_conductor_unforeseen_requests_total": _counter("Requests that there was no room to predict"),
    "pyengine_conductor_role_switches_total": _counter("Workers that were told to change their role"),
    "pyengine_conductor_role_switches_given_up_total": _counter("Changes of role that were taken back"),
    "pyengine_index_blocks": _gauge("Blocks of a node that the conductor knows", "node"),
}

WORKER = {
    "pyengine_worker_info": _gauge("Always 1; labels say what computes", "worker", "backend", "dtype", "kv_dtype"),
    "pyengine_worker_tokens_total": _counter("Tokens computed", "worker", "phase"),
    "pyengine_recomputed_tokens_total": _counter("Tokens computed again, as their KV was lost", "worker"),
    "pyengine_cached_tokens_total": _counter("Prompt tokens reused, by where they were found", "worker", "tier"),
    "pyengine_worker_steps_total": _counter("Forward passes", "worker"),
    "pyengine_worker_seconds_total": _counter(
        "Seconds in the model, as predicted before each step, and in the loop beside it", "worker", "of"
    ),
    "pyengine_worker_blocks_total": _counter(
        "Blocks stored in the pool, loaded from it, or left uncached", "worker", "event"
    ),
    "pyengine_worker_requests": _gauge("Requests at a worker", "worker"),
    "pyengine_worker_pages": _gauge("Device pages that requests hold", "worker", "state"),
    "pyengine_cost_error": _gauge("Relative error of predicted steps", "worker"),
    "pyengine_cost_samples_total": _counter("Steps that were measured", "worker"),
    "pyengine_cost_seconds": _gauge("What a step costs, as fitted, by what it is for", "worker", "per"),
}

DAEMON = {
    "pyengine_transfer_bytes_total": _counter(
        "Bytes of whole blocks that crossed between nodes, verified at the destination",
        "transport",
        "direction",
        "node",
    ),
    "pyengine_transfer_blocks_total": _counter(
        "Whole blocks that crossed between nodes, or were handed over within the arena",
        "transport",
        "direction",
        "node",
    ),
    "pyengine_transfer_retries_total": _counter("Copies that were sent again", "node"),
    "pyengine_pool_blocks": _gauge(
        "Slots of the pool; the states of a tier add up to its size", "node", "tier", "state"
    ),
    "pyengine_pool_grants": _gauge("Grants that are held, that wait, that wait within a quota", "node", "state"),
    "pyengine_pool_kept_blocks": _gauge("Blocks that somebody has pinned for a time", "node"),
    "pyengine_pool_kept_bytes": _gauge("Bytes of blocks that somebody has pinned for a time", "node"),
    "pyengine_pool_kept_limit_bytes": _gauge("Bytes that may be pinned for a time, all together", "node"),
    "pyengine_pool_evictions_total": _counter("Blocks that were removed to make room", "node"),
    "pyengine_pool_dropped_total": _counter("Blocks that were evicted and are on no medium of the node", "node"),
    "pyengine_pool_hits_total": _counter("Keys that grants, lookups and fetches have found", "node", "tier"),
    "pyengine_pool_misses_total": _counter("Keys that grants and lookups have not found", "node"),
    "pyengine_pool_demotions_total": _counter("Blocks that were written from DRAM to SSD", "node"),
    "pyengine_pool_demoted_bytes_total": _counter("Bytes of blocks that were written from DRAM to SSD", "node"),
    "pyengine_pool_promotions_total": _counter("Blocks that were read from SSD into DRAM", "node"),
    "pyengine_pool_promoted_bytes_total": _counter("Bytes of blocks that were read from SSD into DRAM", "node"),
    "pyengine_single_flight_total": _counter("Wanted blocks that waited for a read already under way", "node"),
    "pyengine_fetches_abandoned_total": _counter("Fetches that a peer did not answer in time", "node"),
    "pyengine_checksum_failures_total": _counter("Checksums that did not hold, by where", "node", "where"),
    "pyengine_fenced_writes_total": _counter("Writes refused because the life of their slot was over", "node"),
    "pyengine_tier_limit_bytes": _gauge("Bytes that a medium may take", "node", "tier"),
    "pyengine_tier_used_bytes": _gauge("Bytes that a medium takes, with all it keeps for itself", "node", "tier"),
    "pyengine_tier_waiting_bytes": _gauge("Bytes that wait to be written to a medium", "node", "tier"),
    "pyengine_tier_refused_writes_total": _counter(
        "Writes that a medium had no room for, or failed at", "node", "tier"
    ),
    "pyengine_tier_over_quota_total": _counter("Blocks not written, as their owner has his quota", "node", "tier"),
    "pyengine_tier_trouble": _gauge("How a medium does: 0 good, 1 reads only, 2 failed", "node", "tier"),
}

FAMILIES = VLLM | GATEWAY | CONDUCTOR | WORKER | DAEMON
FAMILIES |= {old: FAMILIES[new]._replace(help=f"As {new}, for older dashboards") for old, new in ALIASES.items()}

_SECTIONS = (
    (
        "vLLM's names",
        VLLM,
        "Counted as vLLM counts, with its buckets. Workers' samples have `worker` where vLLM has "
        "`engine`. In a prefill worker a request runs until its first token, in a decode worker from then on.",
    ),
    ("Gateway", GATEWAY, "Of one gateway: sum over all of them. Tenants appear where keys are asked for."),
    ("Conductor", CONDUCTOR, "Every gateway shows the whole cluster's: take one gateway's, or the maximum."),
    ("Workers", WORKER, "Told with heartbeats, and shown by every gateway."),
    ("Nodes", DAEMON, "Told by transferd with its heartbeats, and shown by every gateway."),
)


def document() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "What `GET /metrics` shows, in Prometheus' text format. This page is made by",
        "`python -m pyengine.gateway.catalog`: change it there.",
        "A dashboard for Grafana that shows the most important ones is in [grafana.json](grafana.json); what to watch,",
        "health checks and traces are in [observing.md](observing.md).",
    ]
    for title, families, text in _SECTIONS:
        lines += ["", f"## {title}", "", text, "", "| name | type | labels | what |", "|---|---|---|---|"]
        for name, family in families.items():
            labels = ", ".join(f"`{label}`" for label in family.labels)
            lines.append(f"| `{name}` | {family.kind} | {labels} | {family.help} |")
    lines += ["", "## Older names", "", "| name | the same as |", "|---|---|"]
    lines += [f"| `{old}` | `{new}` |" for old, new in ALIASES.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
