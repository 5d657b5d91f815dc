"""SageMaker model parallel (SMP): sets of files, one for each model-parallel rank."""
