"""From a point of a design space to a measured time: build, send, measure."""
