"""What tuning is worth: the figures of `docs/tuning.md` (`python -m benchmarks.tuning`)."""
