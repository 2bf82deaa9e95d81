"""The device side of edgebundle: verify a bundle, run it in a worker, serve it over MQTT."""

from __future__ import annotations

__version__ = "0.1.0"
