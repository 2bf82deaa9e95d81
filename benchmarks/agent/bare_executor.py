"""A model in an executor, without agent or broker: `python -m benchmarks.agent.bare_executor BUNDLE THREADS`.

It prints `ready`. Then, for each number of seconds that it reads, it runs the model for that long and prints
the seconds of each run as JSON.
"""

from __future__ import annotations

import json
import sys
import time

from builder.bundles.package import Package
from builder.running.local_run import prepared


def main() -> None:
    """Run the model for each number of seconds that is read from standard input."""
    module = prepared(Package.load(sys.argv[1]), int(sys.argv[2]))
    module.run()
    print("ready", flush=True)
    for line in sys.stdin:
        end_s = time.perf_counter() + float(line)
        times = []
        while (start_s := time.perf_counter()) < end_s:
            module.run()
            times.append(time.perf_counter() - start_s)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
