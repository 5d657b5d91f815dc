"""What to do about names of neuronx-distributed that are not there. Pure."""

from __future__ import annotations

KEEP_NXD = (
    "Keep neuronx_distributed for it, and import the checkpoint functions alone from neuron_compat.nxd "
    "(docs/from-nxd.md)."
)
FINALIZE = "Saves in flight are kept by the library: nxd.finalize_checkpoint() waits for them."
TAGS = "xla_ckpt.list_tags, latest_tag and has_checkpoint say what a directory holds."
PATH = "Checkpoints are directories of a file system: give their path."
MOUNT = "Mount the bucket, or copy the directory from and to it."
CONVERT = "xla-ckpt convert changes topology and layout, and xla-ckpt export writes Hugging Face's files."
NO_STAGES = "It is for pipeline stages, which models here are not divided into."
JOIN_LOGITS = "Join the logits (gather_output=True), and call torch's own cross_entropy."
KERNELS = "They are for Trainium: use torch's own operations here."
TRACE = "It compiles models for Trainium's inference: call the model itself here."
LAYER_NORM = "torch.nn.LayerNorm and torch.nn.RMSNorm do here, where sequences are not split."
