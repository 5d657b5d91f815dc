"""SageMaker model parallel (SMP) checkpoints: sets of files, one for each model-parallel rank."""
