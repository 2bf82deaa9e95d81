"""What crosses MQTT: topics and documents as frozen types, with one reader, one writer and one set of limits.

No input or output, and no numpy. The agent and the builder both import this room.
"""
