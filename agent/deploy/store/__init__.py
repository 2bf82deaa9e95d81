"""The bundle store on disk: bundles, partial downloads, and which model runs which bundle."""
