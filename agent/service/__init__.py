"""The running agent: it takes requests over MQTT, lets workers answer them, and publishes its state.

`service` wires up all parts. `requests` has the way of a request and its answer, `models` the queue, the
worker and its life cycle for each model, `metrics` what is counted and measured. `presence` keeps the agent's
state topic correct, `notify` talks to systemd.
"""
