"""neuronx-distributed's and SageMaker model parallel's calls, over xla_ckpt."""
