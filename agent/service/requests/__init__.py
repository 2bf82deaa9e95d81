"""Inference requests and their answers, from the message that arrives to its acknowledgement."""
