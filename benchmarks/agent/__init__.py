"""What the agent costs and withstands as a service, with a real broker: `make bench-agent`."""
