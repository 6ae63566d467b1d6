"""Where the time to one request's first token went, as a Server-Timing header. Pure.

    arrived --tokenize--> asked --schedule--> planned --queue--> --load--> --prefill--> --return--> first token
                                                        (the prefill worker's clock)
    first token --held--> shown
    first token --handoff--> second token, which the decode worker chose

This is the only definition of these times: the header, `/metrics`, traces, the log and the dashboard all tell what
`parts` says. `ttft` is from `arrived` to `shown`: the sum of all up to the first token, and `held`, for which the
gateway may have kept it back (`Request.shown`).

Reference: W3C Server Timing; durations in milliseconds.
"""

from __future__ import annotations

import math

from pyengine.gateway.request import Request

#: What adds up to the time until the first token came, in order.
FIRST_TOKEN_PARTS = ("tokenize", "schedule", "queue", "load", "prefill", "return")


def parts(request: Request) -> dict[str, float]:
    """Seconds by part, as far as they are known yet, in the order of the picture. Empty before the first token.

    ttft: of a token that is held, so far as is known: until it came.
    """
    if math.isnan(request.came):
        return {}
    report = request.report
    worker = {"queue": report.queued, "load": report.loading, "prefill": report.computing} if report else {}
    # A retry asks again: the plan that led to the token is the last one.
    made = {"tokenize": request.asked - request.arrived, "schedule": request.planned - request.asked, **worker}
    made["return"] = request.came - request.planned - sum(worker.values())
    made = {name: max(value, 0.0) for name, value in made.items()}
    held = 0.0 if math.isnan(request.given) else request.given - request.came
    made["held"] = held
    made["ttft"] = request.came - request.arrived + held
    if not math.isnan(request.second):
        made["handoff"] = request.second - request.came
    return made


def header(request: Request) -> str:
    """As the header's value."""
    return ", ".join(f"{name};dur={1000.0 * value:.2f}" for name, value in parts(request).items())
