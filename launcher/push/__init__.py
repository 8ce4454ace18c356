"""Upload of a run's weights to the Hugging Face hub, with a model card made from its record."""
