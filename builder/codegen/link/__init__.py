"""Link kernels and the launcher into `mod.so`, for any target."""
