"""The process that serves one model, behind a sandbox; only `channel` is for others."""
