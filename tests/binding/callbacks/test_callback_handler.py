"""Lifetime and failed allocations of _C.CallbackHandler."""

import gc
import sys
from types import SimpleNamespace

import pytest

from ctrainer._C import CallbackHandler

ARGS = SimpleNamespace(
    logging_strategy="steps",
    eval_strategy="steps",
    save_strategy="epoch",
    logging_first_step=True,
    eval_delay=0,
)
STATE = SimpleNamespace(
    global_step=1, max_steps=1, epoch=1.0, logging_steps=1, eval_steps=2, save_steps=3
)


class Narrow:
    def on_log(self, args, state, control, logs, tokenizer=None):
        return None

    def on_step_end(self, args, state, control, **kwargs):
        """Nothing."""


def exercise() -> SimpleNamespace:
    handler = CallbackHandler([Narrow()], 1, 2, 3, 4)
    control = SimpleNamespace(should_training_stop=False)
    handler.on_log(ARGS, STATE, control, {"loss": 1.0}, model=5)
    handler.on_epoch_end(ARGS, STATE, control)
    handler.on_step_end(ARGS, STATE, control)
    handler.call_event("on_step_end", ARGS, STATE, control, extra=handler)
    return control


def test_any_number_of_extras_arrives_with_their_values() -> None:
    seen = {}

    class Recording:
        def on_save(self, args, state, control, **kwargs):
            seen.update(kwargs)

    handler = CallbackHandler([Recording()], 1, 2, 3, 4)
    control = SimpleNamespace(should_save=True)
    extras = {f"k{i}": i for i in range(40)}
    handler.on_save(ARGS, STATE, control, **extras)
    assert seen.items() >= extras.items()


def test_no_reference_is_kept() -> None:
    kinds = (CallbackHandler, Narrow)

    def measure() -> tuple[list[int], int]:
        gc.collect()
        return [sys.getrefcount(kind) for kind in kinds], sys.getallocatedblocks()

    exercise()
    counts, blocks = measure()
    for _ in range(1000):
        exercise()
    counts_after, blocks_after = measure()
    assert counts_after == counts
    assert abs(blocks_after - blocks) < 500  # the interpreter's own noise; a leak: 1000


def test_survives_every_failed_allocation() -> None:
    testcapi = pytest.importorskip("_testcapi")
    exercise()  # imports what it needs
    control = None
    for start in range(400):
        testcapi.set_nomemory(start)
        try:
            control = exercise()
        except MemoryError:
            pass
        finally:
            testcapi.remove_mem_hooks()
        if control is not None:
            break
    assert control is not None


def test_init_twice_leaves_the_second() -> None:
    handler = CallbackHandler([Narrow()], 1, 2, 3, 4)
    handler.train_dataloader = "old"
    handler.__init__([], "model", None, None, None)
    assert (handler.callbacks, handler.model, handler.train_dataloader) == (
        [],
        "model",
        None,
    )


@pytest.mark.parametrize(
    "wrong", [lambda: CallbackHandler(1, 2, 3, 4, 5), lambda: CallbackHandler([])]
)
def test_wrong_arguments_are_type_errors(wrong) -> None:
    with pytest.raises(TypeError):
        wrong()


def test_event_wants_three_values() -> None:
    handler = CallbackHandler([], 1, 2, 3, 4)
    for given in [(), (1, 2), (1, 2, 3, 4)]:
        with pytest.raises(TypeError, match="on_save takes args, state and control"):
            handler.on_save(*given)
    with pytest.raises(TypeError, match="takes the event's name"):
        handler.call_event(1, 2, 3, 4)


def test_a_copy_has_every_object_or_there_was_no_memory_for_it() -> None:
    testcapi = pytest.importorskip("_testcapi")
    state = CallbackHandler([Narrow()], 1, 2, 3, 4).__getstate__()
    for start in range(200):
        copy = CallbackHandler([], None, None, None, None)
        taken = False
        testcapi.set_nomemory(start)
        try:
            copy.__setstate__(state)
            taken = True
        except MemoryError:
            pass
        finally:
            testcapi.remove_mem_hooks()
        if taken:
            break
    assert start > 2
    assert copy.__getstate__() == state


class Interrupting:
    """Asked for what it can do, or for its hash, it is interrupted."""

    should_training_stop = property(lambda self: interrupt())

    def __hash__(self) -> int:
        return interrupt()

    def __call__(self, args, state, control, **kwargs):
        return control


def interrupt() -> int:
    raise KeyboardInterrupt


def test_an_interruption_while_a_callback_is_looked_at_goes_on() -> None:
    class Answers:
        def on_save(self, args, state, control, **kwargs):
            return Interrupting()

    handler = CallbackHandler([Answers()], 1, 2, 3, 4)
    with pytest.raises(KeyboardInterrupt):
        handler.on_save(ARGS, STATE, SimpleNamespace(should_training_stop=False))
    listening = SimpleNamespace(on_save=Interrupting())
    handler = CallbackHandler([listening], 1, 2, 3, 4)
    with pytest.raises(KeyboardInterrupt):
        handler.on_save(ARGS, STATE, SimpleNamespace(should_training_stop=False))
