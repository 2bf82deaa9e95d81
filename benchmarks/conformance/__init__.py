"""Models that other packages ship or export, compiled, run, and judged by those packages' own numbers."""
