"""Verdicts: tuned against untuned, timed alternately, to decide whether a result is used."""
