"""The running agent: it takes requests over MQTT, lets workers answer them, and publishes its state.

`service` wires up all parts. `inference` takes a request to its answer and acknowledges it; `requests` holds
the parts for that, `models` each model's queue and worker. `metrics` counts and measures; `gauges` reads the
current values of all parts. `announcements` has what is retained about the device, its models and entities;
`presence` keeps the agent's state topic correct, with the number of this start
from `session_seq`; `trusted_keys` reads the keyring; `notify` talks to systemd.
"""
