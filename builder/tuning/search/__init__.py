"""Search strategies: which points of a design space to measure next."""
