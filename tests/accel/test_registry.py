"""The allowlist, and what the site functions do inside and outside a scope."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from accel import fusion
from accel.errors import ConfigError
from accel.fusion import references, registry
from accel.fusion.scope import current_scope, fusion_scope
from accel.record import Reason
from accel.site_names import SITE_NAMES

GOLDEN = Path(__file__).parents[1] / "golden" / "flux3" / "elementary.safetensors"


def test_names_match_the_registry_and_the_public_functions():
    assert tuple(site.name for site in registry.sites()) == SITE_NAMES
    assert set(fusion.__all__) == set(SITE_NAMES)
    assert all(site.tier == "exact" and site.evidence for site in registry.sites())


def test_unknown_site_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean 'swiglu'\?.*modulate"):
        registry.get("swi_glu")
    with pytest.raises(ConfigError, match="did you mean 'modulate'"), fusion_scope({"modulat"}, print):
        pass


def test_scope_reports_every_call_and_ends():
    normed, vector, seen = torch.randn(1, 5, 8), torch.randn(1, 1, 8), []
    expected = (1 + vector) * normed + vector
    with fusion_scope(frozenset({"modulate"}), seen.append):
        assert torch.equal(fusion.modulate(normed, vector, vector), expected)
        fusion.swiglu(normed)
    fusion.swiglu(normed)
    assert [(o.site, o.fused, o.reason) for o in seen] == [
        ("modulate", False, Reason.NO_CUDA),
        ("swiglu", False, Reason.DISABLED),
    ]


def test_a_norm_has_no_third_modulation():
    x, row = torch.ones(1, 2, 4), torch.ones(1, 1, 4)
    with pytest.raises(ValueError, match="too many values"):
        fusion.residual_rms_norm_modulate(x, None, x, *[(row, row)] * 3)


def test_scope_belongs_to_its_thread():
    seen = []
    with fusion_scope(frozenset(), print):
        thread = threading.Thread(target=lambda: seen.append(current_scope()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_sites_are_transparent_to_the_compiler():
    with fusion_scope(frozenset(SITE_NAMES), lambda outcome: pytest.fail("observed while compiling")):
        packed = torch.randn(1, 3, 8)
        compiled = torch.compile(fusion.swiglu, backend="eager", fullgraph=True)
        assert torch.equal(compiled(packed), references.swiglu(packed))


def test_references_run_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from accel.fusion import modulate; from accel.fusion.registry import gate\n"
        "one = torch.ones(1, 2, 4)\n"
        "assert (modulate(one, one, one) == 3).all() and gate('modulate')._kernel is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_qk_norm_rope_matches_golden(dtype):
    """Norm and rotation are golden one by one; each is isolated with a neutral other half."""
    golden = load_file(GOLDEN)
    q, k = golden["qknorm.q"], golden["qknorm.k"]
    scales = [golden["qknorm.query_norm.scale"], golden["qknorm.key_norm.scale"]]
    if dtype == "bf16":
        q, k, *scales = (tensor.bfloat16() for tensor in (q, k, *scales))
    still = torch.cat(
        (torch.ones(1, q.shape[1], q.shape[3] // 2), torch.zeros(1, q.shape[1], q.shape[3] // 2)), -1
    )
    got = fusion.qk_norm_rope(q, k, *scales, still)
    assert torch.equal(got[0], golden[f"qknorm.q_out_{dtype}"])
    assert torch.equal(got[1], golden[f"qknorm.k_out_{dtype}"])
    for kind in ("real", "tiny"):
        cos, sin = golden[f"rope.{kind}.cos_sin"].unsqueeze(2).chunk(2, dim=-1)
        for name in "qk":
            rotated = references._rotate_pairs(golden[f"rope.{kind}.{name}_{dtype}"], cos, sin)
            assert torch.equal(rotated, golden[f"rope.{kind}.{name}_out_{dtype}"])
