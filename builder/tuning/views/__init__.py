"""What a person sees of a tuning run: the progress while it runs, and the report afterwards."""
