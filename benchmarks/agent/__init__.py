"""The agent as a service, measured with a real broker: `make bench-agent`."""
