"""GRPO's formulas as pure functions of tensors and lists."""
