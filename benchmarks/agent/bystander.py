"""Another model's client, `python -m benchmarks.agent.bystander PORT MODEL PER_S`, in a process of its own.

It asks at a rate for the seconds that it reads, and prints latencies and how many were not answered 200: what
the flood's client is busy with must not be taken for the agent's.
"""

from __future__ import annotations

import asyncio
import json
import sys

from benchmarks.agent.models import input_bytes
from benchmarks.agent.requester import Requester, topic_of


async def main() -> None:
    port, model, per_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    async with Requester(port, "bench-bystander") as requester:
        await requester.ready(model)
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(float(line), stop.set)
            tally = await requester.at_rate(topic_of(model), bytes(input_bytes(model)), per_s, stop)
            refused = len(tally.answers) + tally.unanswered - tally.statuses[200]
            print(json.dumps([tally.latencies_s(), refused]), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
