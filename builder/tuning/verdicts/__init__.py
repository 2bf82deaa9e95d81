"""Tuned against untuned, timed in turn: the decision whether a result is used."""
