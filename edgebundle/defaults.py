"""What a request is sent with if the caller does not say."""

from __future__ import annotations

from typing import Final

# Seconds until an answer is of no use.
DEADLINE_S: Final = 30.0
# Requests under way in `map`: two are in the worker, and the others cover the way there and back.
IN_FLIGHT: Final = 4
