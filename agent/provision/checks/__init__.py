"""`edge-agent check`: one file for each thing that is looked at, from the clock to the broker."""
