"""Tensors and arrays to spans: what is read, and how a rejection speaks."""

import gc
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_alone
from torch.nn import Parameter

from ctrainer import optim
from ctrainer._C import OptimEngine
from ctrainer.adapters import numpy as arrays


class Wrapper:
    """The least that an engine drives: groups, state, and any kind of parameter."""

    def __init__(self, *params: Any) -> None:
        options = {"lr": 0.5, "momentum": 0, "dampening": 0, "weight_decay": 0}
        self.param_groups: Any = [{"params": list(params), **options}]
        self.state: Any = {}
        self.engine = OptimEngine("sgd")

    def step(self) -> None:
        self.engine.step(self, None, 1.0, "keep", False, 2.0, None, False)


class Holder:
    """A parameter of the NumPy kind with whatever data and gradient."""

    def __init__(self, data: Any, grad: Any) -> None:
        self.data = data
        self.grad = grad


def ones(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


def forced(param: torch.Tensor, grad: torch.Tensor) -> Parameter:
    """A parameter whose gradient is what torch's own check would not let through."""
    holder = Parameter(torch.empty_like(grad))
    holder.grad = grad
    holder.data = param
    return holder


class TestReads:
    @pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
    def test_float_tensors(self, dtype: str) -> None:
        param = Parameter(torch.ones(3, 2, dtype=getattr(torch, dtype)))
        param.grad = torch.ones_like(param)
        Wrapper(param).step()
        assert param.tolist() == [[0.5, 0.5]] * 3

    @pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
    def test_float_arrays(self, dtype: str) -> None:
        data = np.ones((3, 2), dtype)
        Wrapper(Holder(data, np.ones_like(data))).step()
        assert (data == 0.5).all()

    def test_views_with_an_offset_touch_their_part_alone(self) -> None:
        base = torch.ones(10)
        param = Parameter(base[3:7])
        param.grad = torch.ones(10)[2:6]
        Wrapper(param).step()
        assert base.tolist() == [1.0] * 3 + [0.5] * 4 + [1.0] * 3

    def test_empty_and_scalar_tensors(self) -> None:
        params = [Parameter(torch.ones(s)) for s in ((0,), (2, 0, 3), (), (1, 1))]
        for param in params:
            param.grad = torch.ones_like(param)
        Wrapper(*params).step()
        assert [p.sum().item() for p in params] == [0, 0, 0.5, 0.5]

    def test_dimensions_of_one_may_have_any_stride(self) -> None:
        param = Parameter(torch.ones(4, 1))
        param.grad = torch.ones(1, 4).t()
        Wrapper(param).step()
        assert param.flatten().tolist() == [0.5] * 4

    def test_empty_arrays(self) -> None:
        Wrapper(Holder(ones(0, 3), ones(0, 3))).step()

    def test_leaf_tensors_need_not_be_parameters(self) -> None:
        tensor = torch.ones(2, requires_grad=True)
        tensor.sum().backward()
        Wrapper(tensor).step()
        assert tensor.tolist() == [0.5, 0.5]


class TestRefusals:
    @pytest.mark.parametrize(
        ("grad", "error", "message"),
        [
            (torch.ones(2, 3).t(), ValueError, r"with strides \(1, 3\); expected"),
            (torch.ones(1).expand(3, 2), ValueError, "not contiguous"),
            (torch.ones(3, 2).to_sparse(), ValueError, r"sparse.*\.to_dense\(\)"),
            (torch.ones(3, 2).to_mkldnn(), ValueError, r"to_dense\(\)"),
            (torch.ones(3, 2, dtype=torch.complex64), TypeError, "complex64"),
            (torch.ones(3, 2, dtype=torch.float8_e5m2), TypeError, "float8_e5m2"),
            (torch.empty(3, 2, device="meta"), ValueError, r"to_empty\(device='cpu'\)"),
            ([1.0], TypeError, "is a list; expected a torch.Tensor"),
            (1.0, TypeError, "is a float"),
            (object(), TypeError, "is a object"),
        ],
    )
    def test_gradient_is_named(self, grad: Any, error: type, message: str) -> None:
        wrapper = Wrapper(Holder(ones(3, 2), grad))
        with pytest.raises(error, match=message) as caught:
            wrapper.step()
        assert "param_groups[0]['params'][0].grad" in str(caught.value)

    def test_gradient_of_integers(self) -> None:
        wrapper = Wrapper(Holder(ones(2), np.ones(2, np.int32)))
        with pytest.raises(
            TypeError, match=r"\.grad has dtype int32; expected float32"
        ):
            wrapper.step()

    def test_released_storage(self) -> None:
        param = Parameter(torch.ones(4))
        param.grad = torch.ones(4)
        param.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="storage was released"):
            Wrapper(param).step()

    @pytest.mark.parametrize(
        ("data", "grad", "message"),
        [
            (ones(3, 2), ones(2, 3), r"float32 \(2, 3\); expected float32 \(3, 2\)"),
            (ones(3), ones(3).astype(np.float64), r"float64 \(3,\); expected float32"),
            (ones(3), ones(4), r"\(4,\); expected float32 \(3,\)"),
            (ones(2, 3).T, ones(3, 2), "not contiguous"),
            (ones(3).astype(">f4"), ones(3), "native byte order"),
            (np.frombuffer(bytes(12), np.float32), ones(3), "read-only"),
            (np.frombuffer(bytearray(13), np.float32, offset=1), ones(3), "aligned"),
        ],
    )
    def test_array_is_named(self, data: Any, grad: Any, message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            Wrapper(Holder(data, grad)).step()

    def test_subclasses_of_tensor_are_not_read(self) -> None:
        class Wrapped(torch.Tensor):
            pass

        param = Parameter(torch.ones(2))
        param.grad = torch.ones(2).as_subclass(Wrapped)
        with pytest.raises(TypeError, match=r"Wrapped.*a subclass of torch\.Tensor"):
            Wrapper(param).step()

    def test_subclasses_of_parameter_are_not_read(self) -> None:
        class Special(Parameter):
            pass

        param = Special(torch.ones(2))
        param.grad = torch.ones(2)
        with pytest.raises(TypeError, match="Special"):
            Wrapper(param).step()

    def test_subclasses_of_array_are_not_read(self) -> None:
        with pytest.raises(TypeError, match="is a MaskedArray"):
            Wrapper(Holder(np.ma.ones(2, np.float32), ones(2))).step()

    def test_parameter_without_gradient_attribute(self) -> None:
        with pytest.raises(AttributeError, match="grad"):
            Wrapper(3).step()

    def test_parameter_moved_to_another_dtype_by_data(self) -> None:
        param = forced(torch.ones(3, dtype=torch.float64), torch.ones(3))
        with pytest.raises(ValueError, match=r"\.grad is float32 \(3,\)"):
            optim.SGD([param], lr=0.1).step()

    @pytest.mark.parametrize(
        ("groups", "error"),
        [
            (3, TypeError),
            ([3], TypeError),
            ([{}], TypeError),
            ([{"params": 3}], TypeError),
            ([{"params": "ab"}], TypeError),
        ],
    )
    def test_groups_of_another_form(self, groups: Any, error: type) -> None:
        wrapper = Wrapper()
        wrapper.param_groups = groups
        with pytest.raises(error):
            wrapper.step()

    @pytest.mark.parametrize("state", [3, [], {"x": 1}])
    def test_state_of_another_form(self, state: Any) -> None:
        param = arrays.Parameter(ones(2))
        param.grad = ones(2)
        opt = arrays.AdamW([param])
        opt.state = {param: 3} if state == {"x": 1} else state
        with pytest.raises(TypeError, match="expected a dict"):
            opt.step()

    @pytest.mark.parametrize("made", [3, None, {}, {"step": 3}, {"step": ones(1)}])
    def test_new_state_of_another_form(self, made: Any) -> None:
        class Odd(arrays.AdamW):
            def _new_state(self, parameter: Any, group: Any) -> Any:
                return made

        param = arrays.Parameter(ones(2))
        param.grad = ones(2)
        with pytest.raises((TypeError, ValueError)):
            Odd([param]).step()
        assert (param.data == 1).all()


class TestHostileAttributes:
    """Python code that runs in the middle of a plan and changes what it reads."""

    def test_grad_that_shrinks_its_group(self) -> None:
        wrapper = Wrapper()

        class Shrinking(Holder):
            @property
            def grad(self) -> Any:
                wrapper.param_groups[0]["params"].clear()
                gc.collect()
                return ones(2)

            @grad.setter
            def grad(self, value: Any) -> None:
                pass

        wrapper.param_groups[0]["params"] = [Shrinking(ones(2), None) for _ in range(5)]
        wrapper.step()
        wrapper.step()

    def test_grad_that_steps_again(self) -> None:
        wrapper = Wrapper()

        class Recursive(Holder):
            @property
            def grad(self) -> Any:
                wrapper.step()

            @grad.setter
            def grad(self, value: Any) -> None:
                pass

        wrapper.param_groups[0]["params"] = [Recursive(ones(2), None)]
        with pytest.raises(RuntimeError, match="a second step began"):
            wrapper.step()

    @staticmethod
    def emptying(attribute: str) -> Any:
        class Emptying(arrays.AdamW):
            def _new_state(self, parameter: Any, group: Any) -> Any:
                getattr(self, attribute).clear()
                gc.collect()
                return super()._new_state(parameter, group)

        params = [arrays.Parameter(ones(2)) for _ in range(4)]
        for param in params:
            param.grad = ones(2)
        return Emptying(params), params

    def test_new_state_that_empties_the_state(self) -> None:
        opt, params = self.emptying("state")
        opt.step()
        assert all((p.data < 1).all() for p in params)

    def test_new_state_that_empties_the_groups(self) -> None:
        opt, params = self.emptying("param_groups")
        with pytest.raises(RuntimeError, match="param_groups changed"):
            opt.step()
        assert all((p.data == 1).all() for p in params)


def test_torch_without_the_exchange_table_is_read_by_its_methods() -> None:
    run_alone("optim.without_exchange_table").check_returncode()


def test_numpy_is_trained_without_importing_torch() -> None:
    run_alone("optim.numpy_alone").check_returncode()


def test_survives_every_failed_allocation() -> None:
    testcapi = pytest.importorskip("_testcapi")
    params = [arrays.Parameter(ones(3)) for _ in range(3)]
    opt = arrays.AdamW(params)
    for param in params:
        param.grad = ones(3)
    for start in range(400):
        testcapi.set_nomemory(start)
        try:
            opt.step(max_norm=1.0)
            break
        except MemoryError:
            pass
        finally:
            testcapi.remove_mem_hooks()
    else:
        pytest.fail("never had memory enough")
    opt.step(max_norm=1.0)
    assert all(opt.state[p]["step"] == 2 for p in params)
