"""ctrainer.compat.deepspeed's checkpoints on 2 ranks: DeepSpeed's are loaded and
trained on, and its own written, loaded and compared."""

from typing import Any

import deepspeed_engines as runs
import torch
from programs.run import folder, options, tell

from ctrainer.compat import deepspeed


def made(stage: int, dtype: str, in_groups: bool = False, **more: Any) -> Any:
    model = runs.Model()
    with torch.no_grad():  # other values than those that are loaded
        for param in model.parameters():
            param.fill_(0.5)
    return deepspeed.initialize(
        model=model,
        model_parameters=runs.parameters(model, in_groups),
        config=runs.configuration(stage, dtype) | more,
    )[0]


def rest(engine: Any, dtype: str) -> list[Any]:
    """What the engine says of the passes after the checkpoint."""
    return runs.train(engine, dtype, runs.SAVED_AT, runs.MICRO_STEPS)


results: dict[str, Any] = {}
for name in options["theirs"]:
    stage, dtype, in_groups = runs.CASES[name]
    engine = made(stage, dtype, in_groups)
    _, state = engine.load_checkpoint(f"{options['kept']}/{name.replace(' ', '_')}")
    results[name] = [state, rest(engine, dtype)]
for name in options["universal"]:
    engine = made(2, "fp32")
    engine.load_checkpoint(f"{options['kept']}/{name}", tag="universal")
    results[name] = rest(engine, "fp32")
for name in options["ours"]:
    stage, dtype, in_groups = runs.CASES[name]
    model = runs.Model()
    engine = deepspeed.initialize(
        model=model,
        model_parameters=runs.parameters(model, in_groups),
        config=runs.configuration(stage, dtype),
    )[0]
    runs.train(engine, dtype, 0, runs.SAVED_AT)
    place = f"{folder}/{name.replace(' ', '_')}"
    engine.save_checkpoint(place, client_state={"epoch": 3})
    own = rest(engine, dtype)
    engine.load_checkpoint(place)  # into the engine that has trained on
    results[f"ours {name}"] = [own, rest(engine, dtype)]
    engine = made((stage + 2) % 4, dtype, in_groups)  # of another stage
    _, state = engine.load_checkpoint(place)
    results[f"other {name}"] = [state, rest(engine, dtype)]
engine.save_16bit_model(f"{folder}/low")
tell(results)
