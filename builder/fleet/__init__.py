"""What a workstation does with agents over MQTT: list them, deploy a bundle, send a request.

Functions that return frozen values; the command line prints them. The documents and properties that cross
MQTT are those of `agent.wire`; nothing here imports the agent's service or deployment.
"""
