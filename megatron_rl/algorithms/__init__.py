"""Pure: GRPO's formulas on tensors and lists."""
