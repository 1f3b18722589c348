"""Faults in code for a GPU that `run.py --device` tries before it draws others there:
in the order of streams, in memory that comes and goes, in kernels."""

from __future__ import annotations

from mutants.known import Fixed

STEP, ENQUEUED = "cuda/test_step.cpp", "device/test_enqueued_updates_device.py"
FSDP, NCCL = "cuda/test_fsdp.cpp", "cuda/test_nccl.cpp"
MAPPING, LAUNCH = "cuda/test_mapping.cpp", "cuda/test_launch.cpp"

DEVICE = (
    Fixed(
        "cuda/norm.cu",
        "wrong stream or rank",
        "launch(stream, p, batch, next);",
        "launch(NULL, p, batch, next);",
        "the norm's first sums run on the NULL stream",
        LAUNCH,
    ),
    Fixed(
        "cuda/comm_nccl.c",
        "wrong stream or rank",
        "comm->stream);",
        "NULL);",
        "a gather runs on the NULL stream",
        FSDP,
        behind="case CT_ALL_GATHER:",
    ),
    Fixed(
        "csrc/core/fsdp/unit.c",
        "drop a synchronisation",
        "status = ct_comm_follow(comm, unit->stream, err);",
        "status = CT_OK;",
        "a gather is not ordered behind the compute",
        FSDP,
        behind="gather_group(ct_fsdp *unit, ct_comm *comm, ct_fsdp_group *g, "
        "const ct_span *shard,",
    ),
    Fixed(
        "cuda/mapping.c",
        "drop a synchronisation",
        "(void)cudaEventRecord(block->left, (cudaStream_t)map->stream);",
        ";",
        "memory is released without an event behind its last use",
        MAPPING,
    ),
    Fixed(
        "cuda/comm_nccl.c",
        "drop a synchronisation",
        "settle((member *)op, &work->done, work->what, err);",
        "CT_OK;",
        "a prefetched gather is not waited for before it is used",
        FSDP,
    ),
    Fixed(
        "cuda/reduce.cuh",
        "drop a synchronisation",
        "__syncthreads(); /* of_warp is free for the next chunk */",
        ";",
        "warps write the sums of the next chunk while others are read",
        "cuda/test_norm.cpp",
    ),
    Fixed(
        "cuda/launch.cuh",
        "off by one",
        "begin + (left < ct_cuda_chunk_elems ? left : ct_cuda_chunk_elems)};",
        "begin + ct_cuda_chunk_elems};",
        "a chunk does not end where its span does",
        LAUNCH,
    ),
    Fixed(
        "cuda/elementwise.cu",
        "off by one",
        "chunk += gridDim.x) {",
        "chunk += gridDim.x > 1 ? gridDim.x - 1 : 1) {",
        "blocks zero each other's chunks",
        "cuda/test_elementwise.cpp",
        behind="zero_kernel(const",
    ),
    Fixed(
        "cuda/elementwise.cu",
        "swap operands",
        "ct_store(ct_load(sum) + ct_load(added), &sum);",
        "ct_store((real)fmaf((float)ct_load(value), (float)factor, "
        "(float)ct_load(sum)), &sum);",
        "a product and a sum are contracted",
        "cuda/test_elementwise.cpp",
    ),
    Fixed(
        "cuda/launch.cuh",
        "swap operands",
        "const size_t begin = (chunk - first) * ct_cuda_chunk_elems;",
        "const size_t begin = (unsigned)((chunk - first) * ct_cuda_chunk_elems);",
        "an index has 32 bits",
        LAUNCH,
    ),
    Fixed(
        "cuda/device.cu",
        "drop a synchronisation",
        'return ct_cuda_check(cudaStreamSynchronize(s), "wait for the stream", err);',
        "return CT_OK;",
        "the host reads what has not been copied yet",
        MAPPING,
    ),
    Fixed(
        "cuda/comm_nccl.c",
        "swap operands",
        "cudaMemcpyDeviceToHost, stream),",
        "cudaMemcpyHostToDevice, stream),",
        "a result is copied in the wrong direction",
        NCCL,
    ),
    Fixed(
        "cuda/comm_nccl.c",
        "delete a call",
        "*s = (staging){0};",
        ";",
        "a buffer that was freed is freed again",
        NCCL,
    ),
    Fixed(
        "csrc/binding/optim/engine.c",
        "skip a check",
        "ct_status status = ct_device_switch(device, &ordinal, &err);",
        "ct_status status = CT_OK;",
        "an update runs with another device current than the parameters'",
        "device/test_optimizers_device.py",
    ),
    Fixed(
        "cuda/quantized.cu",
        "skip a check",
        "const bool bad = !(scale == scale);",
        "const bool bad = false;",
        "a block with NaN is quantized",
        "cuda/test_quantized.cpp",
    ),
    Fixed(
        "cuda/update.cu",
        "skip a check",
        "if (options.clip != NULL && options.clip->skip) {",
        "if (0) {",
        "an update that the device skips is written",
        STEP,
    ),
    Fixed(
        "cuda/device.cu",
        "drop a synchronisation",
        "ct_cuda_check(cudaEventSynchronize((cudaEvent_t)read->event),",
        "ct_cuda_check(cudaSuccess,",
        "a result is read before it has arrived",
        STEP,
    ),
    Fixed(
        "csrc/binding/trainer/update.c",
        "delete a call",
        "(!result.updated && step_schedule_back(op) < 0)",
        "0",
        "the schedule keeps the step of an update that the device skipped",
        ENQUEUED,
    ),
    Fixed(
        "csrc/binding/trainer/loop.c",
        "drop a synchronisation",
        "(wanted && (ctpy_await_update(op) < 0 ||",
        "(wanted && (0 ||",
        "a log does not wait for the update's norm",
        ENQUEUED,
    ),
    Fixed(
        "csrc/binding/optim/engine.c",
        "delete a call",
        "return failed ? -1 : self->result.updated ? 0 : optim_count_steps(self);",
        "return failed;",
        "a parameter counts an update that the device skipped",
        ENQUEUED,
    ),
)
