"""The agent at work: it takes requests over MQTT, has workers answer them, and says how it is.

In the order in which a request passes: `requests` (what is asked), `answers` (seen before?),
`models` and `workers` (who answers), `worker_process` (the process), `inference` (all of it together) and
`acknowledgement` (when the broker may forget it). `service` wires it up.
"""
