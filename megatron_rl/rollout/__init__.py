"""From prompts of the stream to scored groups: driver, stream, evaluation, bank."""
