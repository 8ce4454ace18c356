"""Import of container images into a shared cache."""
