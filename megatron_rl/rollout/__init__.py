"""From prompts of the stream to scored groups: a rank's driver, evaluation, what people look at, the bank."""
