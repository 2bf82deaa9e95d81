"""What a person sees of tuning: the live view and the report."""
