"""The figures of `docs/tuning.md`: how much tuning gains (`python -m benchmarks.tuning`)."""
