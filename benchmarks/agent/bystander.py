"""A client of another model during overload: `python -m benchmarks.agent.bystander PORT MODEL PER_S`.

For each number of seconds that it reads from standard input, it sends requests at a constant rate for that
long, and prints their latencies and how many were not answered with 200. It is a separate process, so that
the flooding client does not delay it.
"""

from __future__ import annotations

import asyncio
import json
import sys

from benchmarks.agent.models import input_bytes
from benchmarks.agent.requester import Requester


async def main() -> None:
    """Send requests for each number of seconds that is read from standard input."""
    port, model, per_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    async with Requester(port, "bench-bystander") as requester:
        await requester.ready(model)
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(float(line), stop.set)
            tally = await requester.at_rate(requester.topic_of(model), bytes(input_bytes(model)), per_s, stop)
            refused = len(tally.answers) + tally.unanswered - tally.statuses[200]
            print(json.dumps([tally.latencies_s(), refused]), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
