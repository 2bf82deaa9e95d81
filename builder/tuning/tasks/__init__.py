"""What there is to tune in a model, and how far each task has got."""
