"""What a workstation does with agents over MQTT: list them, deploy a bundle, send a request.

The functions return frozen values, which the command line prints. The documents and properties that cross
MQTT are those of `agent.wire`; nothing here imports the agent's service or deployment.
"""
