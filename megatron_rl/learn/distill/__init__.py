"""Distillation on policy: a teacher judges every token that the policy samples."""
