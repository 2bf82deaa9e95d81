"""The running agent: it takes requests over MQTT, lets workers answer them, and publishes its state.

`service` wires up all parts, and starts and stops them. They are, by what they do:

- requests: `inference` takes a request to its answer and acknowledges it, with the parts in `requests`;
  `models` has each model's queue and worker; `groups` asks for the requests of groups.
- the control connection: `presence` keeps the agent's state topic correct, with the number of this start from
  `session_seq`; `announcements` publishes what is retained about the device, its models and its entities in
  Home Assistant; `control_messages` hands on what arrives.
- numbers: `metrics` counts and measures; `gauges` reads the current values of all parts.
- the machine: `notify` talks to systemd, `trusted_keys` reads the keyring, `client_ids` keeps the identifiers
  of the connections.
"""
