"""`python -m builder` is `edgebundle`."""

from __future__ import annotations

import sys

from builder.cli import main

if __name__ == "__main__":
    sys.exit(main())
