import pytest
import torch

from accel.fusion import quantize_rows, swiglu
from pipelines.flux3_action.fp8 import Fp8Linear, dequantized_product, scaled_product


def multiplies_scaled_rows() -> bool:
    """Whether this torch has the product on the CPU; older ones have it on CUDA alone."""
    values, scale = quantize_rows(torch.ones(16, 16))
    try:
        scaled_product(values, scale, values, scale)
    except RuntimeError:
        return False
    return True


needs_scaled_rows = pytest.mark.skipif(not multiplies_scaled_rows(), reason="this torch has it on CUDA alone")


def random_linear(in_features, out_features, seed=0):
    linear = Fp8Linear(in_features, out_features)
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed))
    values, scale = quantize_rows(weight)
    linear.weight.copy_(values)
    linear.weight_scale.copy_(scale)
    return linear, weight


def test_quantisation_is_exact(golden, golden_case):
    case = golden_case("fp8r_quantize")
    tensors = golden(case["file"])
    values, scale = quantize_rows(tensors[case["inputs"]["x"]])
    expected = tensors[case["outputs"]["values"]]
    assert values.dtype == expected.dtype
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, tensors[case["outputs"]["scale"]])


def test_linear_matches_the_reference(golden, golden_case):
    case = golden_case("fp8r_linear")
    tensors = golden(case["file"])
    x, weight, scale = (tensors[case["inputs"][n]] for n in ("x", "weight", "weight_scale"))
    linear = Fp8Linear(weight.shape[1], weight.shape[0])
    linear.weight.copy_(weight)
    linear.weight_scale.copy_(scale)
    expected = tensors[case["outputs"]["out"]]
    torch.testing.assert_close(linear(x), expected, **case["tol"])


@needs_scaled_rows
def test_native_product_matches_the_reference(golden, golden_case):
    case = golden_case("fp8r_linear")
    tensors = golden(case["file"])
    x, weight, scale = (tensors[case["inputs"][n]] for n in ("x", "weight", "weight_scale"))
    native = scaled_product(*quantize_rows(x[0]), weight, scale)
    torch.testing.assert_close(native, tensors[case["outputs"]["out"]][0], **case["tol"])


@needs_scaled_rows
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 80])
def test_both_products_agree_at_any_row_count(rows):
    linear, weight = random_linear(64, 48)
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    arguments = (*quantize_rows(x), linear.weight, linear.weight_scale)
    native, dequantized = scaled_product(*arguments), dequantized_product(*arguments)
    assert native.shape == (rows, 48)
    torch.testing.assert_close(native, dequantized.bfloat16(), atol=0.02, rtol=0.01)
    error = (dequantized.float() - x.float() @ weight.T).norm() / (x.float() @ weight.T).norm()
    assert error < 0.06


def test_a_row_of_zeros_gives_zeros():
    linear, _ = random_linear(32, 16)
    assert torch.equal(linear(torch.zeros(1, 3, 32)), torch.zeros(1, 3, 16))


def test_fused_rows_have_the_bits_of_separate_linears():
    first, _ = random_linear(64, 32, seed=2)
    second, _ = random_linear(64, 16, seed=3)
    fused = Fp8Linear(64, 48)
    for name, parameter in fused.named_parameters():
        parts = [dict(linear.named_parameters())[name].data for linear in (first, second)]
        parameter.split([32, 16])[0].copy_(parts[0])
        parameter.split([32, 16])[1].copy_(parts[1])
    x = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert torch.equal(fused(x), torch.cat((first(x), second(x)), dim=-1))


def test_output_keeps_the_dtype_of_the_input():
    linear, _ = random_linear(40, 24)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert linear(torch.ones(2, 3, 40, dtype=dtype)).dtype == dtype


@needs_scaled_rows
@pytest.mark.parametrize("rows", [1, 15])
def test_padding_to_a_tile_leaves_the_other_rows_alone(rows):
    linear, _ = random_linear(64, 48)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    values, scale = quantize_rows(x)
    whole = scaled_product(values, scale, linear.weight, linear.weight_scale)
    padded = scaled_product(values[:rows], scale[:rows], linear.weight, linear.weight_scale)
    assert torch.equal(padded, whole[:rows])


def test_after_swiglu_has_the_bits_of_the_two_steps():
    linear, _ = random_linear(64, 48)
    packed = torch.randn(2, 5, 160, generator=torch.Generator().manual_seed(6)).bfloat16()[..., 32:]
    assert torch.equal(linear.after_swiglu(packed), linear(swiglu(packed)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 80, 3173])
def test_tensor_cores_agree_with_dequantisation(rows):
    linear, _ = random_linear(3072, 9216)
    linear.cuda()
    x = torch.randn(1, rows, 3072, device="cuda", dtype=torch.bfloat16)
    expected = dequantized_product(*quantize_rows(x[0]), linear.weight, linear.weight_scale)
    error = (linear(x)[0].float() - expected).norm() / expected.norm()
    assert error < 0.01
