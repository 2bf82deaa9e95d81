"""`python -m benchmarks.dashboard`: the dashboard's page under a thousand agents, in a real Chromium."""
