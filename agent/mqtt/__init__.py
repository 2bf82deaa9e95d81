"""MQTT as this project uses it: topics, properties, reason codes, and one connection on asyncio.

Agent and client verbs share this package; it knows nothing of models, bundles or workers.
"""
