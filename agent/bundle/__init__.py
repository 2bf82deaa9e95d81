"""The bundle: one signed file that holds a compiled model.

Pure Python and `cryptography`: nothing here imports numpy or tvm-ffi. In the order in which a device uses
them: `archive` (the file), `signature` and `keyring` (who made it), `manifest` and `processing` (what it is),
`verify` (all of it together), `machine` and `admission` (whether it may run here), `graph` and `params` (what
the executor reads). Below them all: `names`, `tensor_spec`, `canonical_json` and `strict_json`.
docs/bundle-format.md specifies the format.
"""
