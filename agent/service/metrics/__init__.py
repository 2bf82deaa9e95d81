"""Metrics: one table of names, one registry, and the ways out (MQTT, Prometheus, Home Assistant)."""
