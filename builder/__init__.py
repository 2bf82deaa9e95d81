"""The workstation side of edgebundle: import, compile, tune and sign models."""
