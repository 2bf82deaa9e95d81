"""The device side of edgebundle: verify a bundle, run it in a worker, serve it over MQTT."""

__version__ = "0.1.0"
