"""Checkpoints: written behind the training, published by rename, verified, loaded into any layout."""
