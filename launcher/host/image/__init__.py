"""The container image, imported once into the shared cache."""
