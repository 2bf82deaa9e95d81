"""Models that serve: one supervised worker process for each."""
