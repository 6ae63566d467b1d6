"""What the papers say: values stated or digitised from their figures, as facts to be compared with.

Sources: "Mooncake: Trading More Storage for Less Computation" (FAST 2025, LLaMA3-70B) and the technical report of the
same system (arXiv 2407.00079 v3). Shares in percent, times in seconds unless a name says ms. Nothing here is ours.
"""

from __future__ import annotations

#: Of the main comparison: TTFT objective (seconds), TBT objectives (ms).
TTFT, TBTS_MS = 30.0, (100, 200, 300)
SYSTEMS = ("mooncake", "vllm", "vllm-pc", "vllm-cp")
WORKLOADS = ("conversation", "tool", "synthetic")

#: Share of requests whose TBT keeps each of TBTS_MS.
TBT_SHARE = {
    "conversation": {
        "mooncake": (96.6, 100.0, 100.0),
        "vllm": (16.1, 38.8, 62.8),
        "vllm-pc": (15.1, 34.3, 56.0),
        "vllm-cp": (9.4, 28.8, 55.4),
    },
    "tool": {
        "mooncake": (93.2, 99.8, 100.0),
        "vllm": (43.1, 45.3, 49.8),
        "vllm-pc": (56.5, 70.0, 81.3),
        "vllm-cp": (18.6, 21.3, 40.4),
    },
    "synthetic": {
        "mooncake": (99.6, 100.0, 100.0),
        "vllm": (61.3, 71.0, 78.1),
        "vllm-pc": (61.0, 70.8, 77.2),
        "vllm-cp": (46.6, 57.3, 69.5),
    },
}
#: TBT p10, p50, p90 in ms, where they can be read.
TBT_MS = {
    "conversation": {
        "mooncake": (57, 74, 92),
        "vllm": (64, 244, 561),
        "vllm-pc": (70, 272, 672),
        "vllm-cp": (105, 280, 416),
    },
    "tool": {"mooncake": (50, 70, 94)},
    "synthetic": {"mooncake": (29, 40, 54)},
}
#: The headline: requests that keep both objectives, Mooncake over plain vLLM, in percent more, by TBTS_MS.
GAIN = {"conversation": (498.0, 157.0, 59.0)}

#: Mean seconds that a request's prefill takes of a GPU node.
PREFILL_SECONDS = {
    "conversation": dict(zip(SYSTEMS, (1.062, 1.661, 1.523, 2.021), strict=True)),
    "tool": dict(zip(SYSTEMS, (0.527, 1.116, 0.740, 1.415), strict=True)),
    "synthetic": dict(zip(SYSTEMS, (0.733, 2.022, 1.896, 2.437), strict=True)),
}

#: Mean TTFT on the conversation, 16 nodes, and as multiples of the first.
TTFT_BY_POLICY = {"kvcache-centric": 3.07, "cache-aware": 3.58, "least-queue-time": 5.27, "random": 19.65}

#: Ten prefill nodes of 3 M tokens, answers of one token: cached share of tokens in percent, prefill seconds.
LOCAL_GLOBAL = {
    "conversation": {"local": (16.9, 1.379), "global": (37.5, 1.051)},
    "synthetic": {"local": (26.4, 1.497), "global": (62.2, 0.783)},
}

#: Synthetic, TTFT <= 10 s, TBT <= 100 ms, by (prefill, decode) nodes: TTFT s, TBT ms, effective percent.
SPLIT_TTFT, SPLIT_TBT_MS = 10.0, 100.0
SPLIT = {
    (5, 11): (5.74, 31.5, 77.7),
    (6, 10): (1.71, 31.8, 97.2),
    (7, 9): (1.30, 32.9, 99.1),
    (8, 8): (1.19, 35.0, 99.0),
    (9, 7): (1.12, 38.2, 99.2),
    (10, 6): (1.11, 44.2, 98.4),
    (11, 5): (1.14, 58.3, 86.1),
}

#: Synthetic: mean TTFT by Gbit/s of each node; None: no reuse at all, everything is recomputed.
BANDWIDTH: dict[int | None, float] = {24: 5.10, 40: 2.40, 80: 1.73, 100: 1.60, 160: 1.41, 400: 1.25, None: 2.62}

#: Conversation: mean replicas over time of the keys that are hit 10th, 100th, ... most.
REPLICAS = {10: 6.9, 100: 4.6, 1000: 2.8, 10000: 0.7}

#: 8 prefill, 8 decode nodes, 23,000 requests at twice the speed: requests rejected, at arrival or after their prefill.
OVERLOAD = {"baseline": 4183, "at-arrival": 3771, "predictive-system": 3589}
OVERLOAD_REQUESTS = 23_000
#: Its load curves with early rejection: mean and deviation of prefill and decode load in percent, their correlation.
OVERLOAD_CURVES = ((54.0, 26.0), (63.0, 14.0), -0.52)
