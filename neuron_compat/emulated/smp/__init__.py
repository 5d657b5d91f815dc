"""SageMaker model parallel's job setup, model, optimizer and steps."""
