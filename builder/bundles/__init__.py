"""Bundles on the workstation: packages, reports on bundles, and the key files that sign them."""
