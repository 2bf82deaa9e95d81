"""What runs models, as deployment sees it: the service's supervisor of workers is one, tests have others."""

from __future__ import annotations

from typing import Protocol

from agent.bundle.verify import VerifiedBundle


class Models(Protocol):
    """What runs models, as deployment sees it."""

    async def activate(self, verified: VerifiedBundle) -> None:
        """Start a worker with the bundle, let it pass its samples, and give it the model's requests.

        What served them before serves them until then, and goes on if this raises. The bundle is the
        callee's from the call on, and closed by it.

        Raises
        ------
        EdgeError
            If the new worker did not start, or its samples did not come out.
        """

    async def deactivate(self, name: str) -> None:
        """Answer what was accepted, and end the model's worker."""
