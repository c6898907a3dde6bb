"""Losses over the global batch, exact, as values and closed-form gradients; nothing here is recorded for autograd."""
