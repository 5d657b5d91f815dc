"""SageMaker model parallel's job, model, optimizer and steps."""
