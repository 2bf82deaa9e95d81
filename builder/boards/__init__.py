"""Boards that run kernels: this machine, or others over RPC. Tracker, server and measuring process."""
