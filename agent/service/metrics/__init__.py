"""Metrics: a table of all names, the counters, the gauges, and the outputs (Prometheus, Home Assistant)."""
