"""From prompts of the stream to scored groups on the ranks that train on them: a rank's driver, the exchange of groups,
evaluation, what people look at, the bank."""
