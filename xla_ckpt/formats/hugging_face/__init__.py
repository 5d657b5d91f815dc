"""Hugging Face formats: safetensors models, and PEFT adapters."""
