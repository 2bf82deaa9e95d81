"""The running agent: it takes requests over MQTT, lets workers answer them, and publishes its state.

`service` wires up all parts. `inference` takes a request from its message to the acknowledgement of its
answer; `requests` has what it goes through, `models` the queue, the worker and its life cycle for each model.
`metrics` has what is counted and where it is published, `gauges` what is measured. `presence` keeps the state
topic correct, `notify` talks to systemd.
"""
