"""What a workstation does with agents over MQTT: who is there, bring them a bundle, ask them for an answer.

Functions that return frozen values; the command line prints them. Nothing here imports the agent's service or
its deployment: both sides speak the documents of docs/deployment.md and docs/mqtt.md.
"""
