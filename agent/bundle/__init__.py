"""The bundle: one signed file that holds a compiled model.

Pure Python and `cryptography`: neither numpy nor tvm-ffi is imported by anything in here. In the order in
which a device uses them: `archive` (the file), `signature` and `keyring` (who made it), `manifest`
(what it is), `verify` (all of it together), `machine` and `admission` (whether it may run here),
`graph` and `params` (what the executor reads). The format is specified in docs/bundle-format.md.
"""
