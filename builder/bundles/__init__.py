"""Bundles on the workstation: made, signed, inspected; and the keys that sign them."""
