"""Checkpoints: written beside the training, published by rename, verified, loaded into any layout."""
