"""Building blocks of recipes: the types of their sections, and the optional packages that a recipe may need."""
