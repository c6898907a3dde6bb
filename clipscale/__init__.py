"""Large-batch CLIP training: the loss curve depends on the global batch and nothing else."""

__version__ = "0.1.0"
