"""`python -m agent` is `edge-agent`."""

from __future__ import annotations

import sys

from agent.cli import main

sys.exit(main())
