"""Convert Llama-like models between Hugging Face names and the fused projections of neuronx-distributed."""
