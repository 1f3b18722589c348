"""Two ranks against fairscale's own wrappers over gloo, on the same batches."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from ranks import GLOO, run_ranks, told

SPEC = importlib.util.find_spec("fairscale")
pytestmark = pytest.mark.skipif(SPEC is None, reason="fairscale is not installed")

TRAININGS = """
import contextlib
os.environ["ENABLE_NCCL_BASE_COLLECTIVES"] = "0"  # gloo refuses their shapes
sys.path.append(FOLDER)
from fairscale.nn import FullyShardedDataParallel as FSDP, ShardedDataParallel as SDP
from fairscale.optim import OSS
from fsdp_scenarios import adamw, mse, tree
from ctrainer.comm.process_group import communicator
from ctrainer.compat import fairscale as ours

torch.set_num_threads(1)
group = communicator()

def updates(model, optimizer):
    for step in range(20):
        with model.no_sync() if step % 5 == 4 else contextlib.nullcontext():
            mse(model, step, group).backward()
        if step % 5 != 4:
            optimizer.step()
            model.zero_grad()  # fairscale's buffers must stay the gradients

def sharded_gradients(oss, wrapper, size):
    module = tree()
    optimizer = oss(module.parameters(), torch.optim.AdamW, lr=1e-2)
    model = wrapper(module, optimizer, reduce_buffer_size=size)
    updates(model, optimizer)
    model.zero_grad(set_to_none=True)
    mse(model, 0, group).backward()
    kept = [p.grad is not None for p in module.parameters()]
    norm = optimizer.clip_grad_norm(0.1)
    state = optimizer.state_dict(all_ranks=True)["state"]
    return [*module.state_dict().values(), norm], state, kept

found = {}
for size in (0, 2**23):
    mine, state, kept = sharded_gradients(ours.OSS, ours.ShardedDataParallel, size)
    theirs, peers, kept_there = sharded_gradients(OSS, SDP, size)
    found[f"tensors {size}"] = [bool(torch.equal(a, b)) for a, b in zip(mine, theirs)]
    found[f"states {size}"] = [
        all(torch.equal(state[i][k], peers[i][k]) for k in peers[i]) for i in peers
    ]
    found[f"kept {size}"] = [kept, kept_there]

class Idle:
    def wait_stream(self, stream):
        pass

idle = Idle()
torch.cuda.current_stream = lambda *unused: idle
torch.cuda.stream = contextlib.nullcontext
torch.cuda.synchronize = torch.Tensor.record_stream = lambda *unused: None

class OnCPU(FSDP):
    def _setup_streams(self):
        super()._setup_streams()
        names = ("fp32_to_fp16", "all_gather", "post_backward")
        self._streams.update(dict.fromkeys(names, idle))

def sharded(wrapper, **options):
    module = tree()
    module[2] = wrapper(module[2], **options)
    model = wrapper(module, **options)
    updates(model, adamw(model))
    return model.state_dict()

cpu = {"compute_device": torch.device("cpu")}
mine, theirs = sharded(ours.FullyShardedDataParallel), sharded(OnCPU, **cpu)
found["names"] = [sorted(mine), sorted(theirs)]
found["apart"] = max(float((mine[k] - theirs[k]).abs().max()) for k in mine)
tell(found)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    assert SPEC is not None
    assert SPEC.origin is not None
    folder = str(Path(SPEC.origin).parent.parent)
    body = GLOO + TRAININGS.replace("FOLDER", repr(folder))
    return told(run_ranks(tmp_path_factory.mktemp("fairscale"), body))


@pytest.mark.parametrize("size", [0, 2**23])
def test_sharded_gradients_train_to_the_same_bits(
    found: list[dict[str, Any]], size: int
) -> None:
    for here in found:
        assert here[f"tensors {size}"] == [True] * 9
        assert here[f"states {size}"] == [True] * 8


def test_ranks_keep_the_same_gradients(found: list[dict[str, Any]]) -> None:
    for here in found:
        ours, theirs = here["kept 0"]
        assert ours == theirs
    assert found[0]["kept 0"] != found[1]["kept 0"]


def test_sharded_parameters_train_alike(found: list[dict[str, Any]]) -> None:
    """Apart by a few roundings of parameters of at most 1, over 16 updates: ours adds
    the ranks' gradients before it divides them, fairscale divides on both sides."""
    for here in found:
        ours, theirs = here["names"]
        assert ours == theirs
        assert here["apart"] < 16 * 4 * 2**-24
