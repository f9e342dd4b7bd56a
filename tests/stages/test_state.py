"""What stages hand on within one request."""

from __future__ import annotations

import pytest

from stages.stage import State


def test_values_are_read_by_the_name_they_were_written_under() -> None:
    state = State(request="lift")
    state["latent"] = 1
    assert (state["request"], state["latent"]) == ("lift", 1)
    assert "latent" in state
    assert "text" not in state


def test_a_value_that_no_stage_wrote_is_named_with_what_there_is() -> None:
    with pytest.raises(KeyError, match="'text' yet; the state holds request"):
        State(request="lift")["text"]
    with pytest.raises(KeyError, match="holds nothing"):
        State()["text"]


def test_no_value_is_replaced() -> None:
    state = State(request="lift")
    with pytest.raises(KeyError, match="'request' is written twice"):
        state["request"] = "open"
    assert state["request"] == "lift"
