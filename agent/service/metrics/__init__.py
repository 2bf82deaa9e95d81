"""Metrics: a table of all names, the counters, the device's gauges, Prometheus and Home Assistant."""
