"""Estimated times of programs on boards: from their instructions and a model of the board's caches."""
