"""The fake wrappers take what FlashInfer's own take, where that is installed. It imports without a GPU."""

from __future__ import annotations

import inspect

import pytest

from tests.engine.fake_flashinfer import LATENT, WRAPPERS, fake_merge_state_in_place


@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_parameters_are_the_real_ones(name: str, method: str) -> None:
    real = getattr(pytest.importorskip("flashinfer"), name)
    of = getattr(real, method)
    if method == "plan":  # the decode wrapper's takes any keywords, and hands them to another one
        of = getattr(real, "_plan_impl", of)
    theirs = inspect.signature(of).parameters
    ours = inspect.signature(getattr(WRAPPERS[name], method)).parameters
    positional = [each for each in ours if ours[each].kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == list(theirs)[: len(positional)]
    for each in ours:
        assert each in theirs
        assert ours[each].default == theirs[each].default, each


@pytest.mark.parametrize(
    ("name", "method"),
    [("BatchMLAPagedAttentionWrapper", method) for method in ("__init__", "plan", "run")]
    + [("MLAPlanMetadata", "csr")],
)
def test_parameters_for_latents_are_the_real_ones(name: str, method: str) -> None:
    theirs = inspect.signature(getattr(getattr(pytest.importorskip("flashinfer.mla"), name), method)).parameters
    ours = inspect.signature(getattr(LATENT[name], method)).parameters
    for each in ours:
        assert each in theirs
        if ours[each].default is not inspect.Parameter.empty:
            assert ours[each].default == theirs[each].default, each


def test_parameters_for_merging_are_the_real_ones() -> None:
    theirs = inspect.signature(pytest.importorskip("flashinfer").merge_state_in_place).parameters
    ours = inspect.signature(fake_merge_state_in_place).parameters
    assert list(ours) == list(theirs)
    assert [each.default for each in ours.values()] == [each.default for each in theirs.values()]
