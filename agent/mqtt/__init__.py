"""MQTT as this project uses it: one connection on asyncio, its settings, properties and reason codes.

The agent and the client commands of the builder share this package; it knows nothing of models, bundles or
workers. From the outside in::

    connection.py      one connection, kept up until it is closed
    negotiation.py     finds the MQTT version that the broker speaks
    backoff.py         how long to wait before the next attempt
    subscriptions.py   which filters are wanted, asked for and granted
    sending.py         QoS 1 messages that wait or are in flight
    engine.py          paho on the event loop: one session
    turns.py           how a connection shares the event loop, and what a flood may cost
    paho_client.py     the methods of paho that are replaced
    transport.py       the TCP or TLS socket
    message.py, properties.py, reason_codes.py    what packets carry
    settings.py, tls.py, diagnosis.py             addresses, certificates, and why a connection failed
"""
