"""What lies on the device's disk: bundles, downloads, which bundles are active, and committed counters."""
