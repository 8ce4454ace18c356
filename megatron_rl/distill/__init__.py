"""On-policy distillation: a teacher judges every token that the policy samples."""
