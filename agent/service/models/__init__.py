"""The models that run: each has a queue, and a supervised worker process that empties it."""
