"""The process that serves one model, in a sandbox; the agent imports only `frames` and `channel`."""
