"""Convert, export, compare and explain checkpoints without a job."""
