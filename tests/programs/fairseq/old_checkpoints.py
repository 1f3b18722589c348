"""fairseq's own upgrade of its old checkpoints makes the same of them as ours."""

from ctrainer.fairseq import install

install(trainer=False)

from fairseq import checkpoint_utils as theirs  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from test_fairseq_old_checkpoints import LAYOUTS  # noqa: E402

from ctrainer.fairseq.checkpoint_utils import upgrade_state_dict  # noqa: E402

theirs.convert_namespace_to_omegaconf = lambda args: None
for name, make in LAYOUTS.items():
    state, other = upgrade_state_dict(make()), make()
    if other.get("cfg") is not None:
        other["cfg"] = OmegaConf.create(other["cfg"])
    other = theirs._upgrade_state_dict(other)
    cfg = other.pop("cfg", None)
    if cfg is not None:
        assert OmegaConf.to_container(cfg) == state["cfg"], (name, cfg)
    state.pop("cfg", None)
    assert other == state, (name, other, state)
