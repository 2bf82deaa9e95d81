"""The output of a tuning run for people: its progress while it runs, and a report afterwards."""
