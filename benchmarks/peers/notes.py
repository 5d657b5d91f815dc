"""What makes the rows comparable, and what does not, said in one place."""

from __future__ import annotations

from benchmarks.peers.states import LINK

NOTES: dict[str, str] = {
    "all": "A state is made of one random block, with another number added in each tensor; XLA tensors lie in memory "
    "that DLPack handed to the device, since making them there takes longer than saving them. All libraries are "
    "imported before the clock starts, orbax included; *The first save of a process* and *Import* are about that.",
    "xla_ckpt": "Digests of every byte, fsync of files and directories, the manifest, and the commit are in its times.",
    "raw limit": "The same bytes from zero-copy views through O_DIRECT by three threads, without names or digests.",
    "durable": "*Durable* is when every file and directory has been fsync'ed: the benchmark does that after each save, "
    "also of those who did it themselves. *Returned* is when the call came back: a crash of the machine could still "
    "lose the files of those who did not.",
    "`xm.save`": "`xm.save` transfers all tensors in one batch and calls `torch.save`, and so does the row.",
    "safetensors": "XLA tensors are transferred in one batch before `save_file`, and after `load_file`, which maps.",
    "dcp": "Stock has a thread for each core, and does not sync by itself (`sync_files=False`). On XLA tensors stock "
    "`dcp.async_save` without our stager fails; its row says how.",
    "orbax": "jax arrays on the CPU, its own kind, since it knows no torch tensors. v0 is `Checkpointer` with "
    "`StandardCheckpointHandler`, and `StandardCheckpointer` where asynchronous; v1 is "
    "`orbax.checkpoint.experimental.v1`.",
    "jax arrays": "Each contender loads what it has saved, onto the arrays of a state that is there: ours verifies "
    "every byte. On 8 devices of one processor, what was split by rows is loaded split by columns.",
    "moonclip": "From the registry, without loss (no `save_dtype`), at compression level 1; each save is a full one, "
    "and waits for its `fsync`. It takes CPU tensors only.",
    "torch_checkpointing": "Meta's package. It asks for torch 2.11 or newer, so it and our rows beside it run in "
    "`.venv-latest`, on CPU tensors. One manager for all saves of a process, and one item; `use_direct_io=False`, as "
    "each save fails on ext4 with the default (`OSError: [Errno 22]`). No fsync, no digests. Asynchronously, another "
    "process writes: by default a thread copies after `save` has returned, and the program holds `manager.lock()` "
    "around its next step, which may wait for that; *copied before it returns* is `use_async_staging=False`. *On our "
    "storage*: `xla_ckpt.integrations.torch_checkpointing`, with digests, compared by its loads, and fsync.",
    "tensorizer": "`TensorSerializer.write_state_dict`, which takes a CRC-32 and a SHA-256 of each tensor, and "
    "`TensorDeserializer(verify_hash=True)`, which checks them. No fsync.",
    "fastsafetensors": "Saves are `ParallelSaver(fsync=True)` with its 16 files; loads are of one file of safetensors, "
    "which has no digests, without GPUDirect Storage (`nogds=True`), into memory of its own.",
    "runai-model-streamer": "It only loads, and files of safetensors; its tensors are memory of its own.",
    "kept stager": "One `DefaultStager` for all saves of a process, so that its memory is warm from the second one on.",
    "transfer, then a thread": "What neuronx-distributed's asynchronous save does.",
    "stall": "The median of all saves of a process but the first; the first is beside it.",
    "in place, and into new memory": "In place, tensors of a live module are filled; what brings tensors of its own "
    "is followed by a copy into them. Into new memory, a mapped file is cloned; other values are taken as they are.",
    "load": "The clock stops when a byte of every page of the values on the device has been read, so that nobody is "
    "done by mapping a file. What this look takes by itself, which a second one shows, is taken off. Then the digest "
    "of all values is compared with that of the saved state: a contender that loads something else has no time.",
    '`snapshot="overlap"`': "No step follows in these rows before the save is done; a step that comes earlier waits "
    "for what is not copied yet, which is stall, too.",
    "simulated accelerator": f"The device of tests/device, in the processor, with a link of {LINK:g} GB/s to the host: "
    "the seconds follow from that choice, and the ratios hardly.",
    "memory": "The rise of the process's peak of resident memory (`VmHWM`) over what it was before the call. An XLA "
    "load makes new buffers, which become the state: the old ones live until all is verified. Mapped files count.",
    "parallel": "ZeRO-1 is torch_xla's optimizer: each of four processes holds the whole model and a quarter of the "
    "moments. The time is that of the slowest rank; GB/s are of all bytes stored.",
    "loop": "The time of a step while a save runs, over that of a step in windows of the same length before and after. "
    "The processor time of a save is that of this process, without the kernel's own threads and interrupts.",
    "object store": "A server of the benchmark's own (`benchmarks/sink_s3.py`), which keeps files in memory, in a "
    "process of its own on the same cores, without TLS and without the delay of a network: what is compared is what "
    "the clients take. Requests are counted at the server, and matter where each one takes 20 ms. A load is into "
    "memory of its own, by a process that has saved before; its digest is compared. The server takes processor time "
    "that a loop beside a save would have, and as much for each contender.",
    "obstore alone, boto3": "A file for each tensor, 16 of them at once; no names, digests, or commit.",
    "`dcp`, s3torchconnector": "Its `S3StorageWriter` and `S3StorageReader` at their defaults, with a thread for each "
    "core. They can be given no endpoint, so the client in them is made for ours.",
    "`dcp`, s3fs": "torch's `FsspecWriter` and `FsspecReader`, with a thread for each core.",
    "neuronx-distributed's S3 code": "`S3CheckpointStorage`: one file of `torch.save`, which it puts into `/dev/shm` "
    "first, and two small ones; a load reads the file as one. Its rows need the package (tests/README.md, `NXD_REAL`).",
}
