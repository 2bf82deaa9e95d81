"""What the agent costs and holds as a service, against a real broker on the loopback: `make bench-agent`."""
