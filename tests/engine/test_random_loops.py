"""Loops composed at random from a seed: as in plain PyTorch, to the bit.

accumulation x clipping x scaler and autocast x scheduler x param groups x freezing x checkpointing
x evaluation x several backwards x ways to zero x edits x failures x save and load x plan x delays
of copies. See tests/recipes.py.
"""

from __future__ import annotations

import pytest
from oracle import assert_bit_equal
from random_loops import run
from recipes import Recipe, Step

FAST, ALL = 20, 320


def assert_same(seed: int) -> None:
    recipe = Recipe.draw(seed)
    expected = run(recipe, ours=False)
    ours = run(recipe, ours=True)
    assert [str(value) for value in ours.losses] == [str(value) for value in expected.losses], (
        recipe
    )
    ours.losses = expected.losses = []  # compared as text, since some are NaN
    assert_bit_equal(ours, expected)


@pytest.mark.parametrize("seed", range(FAST))
def test_a_loop_composed_at_random_gives_the_bits_of_plain_training(seed):
    assert_same(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FAST, ALL))
def test_300_more_loops_composed_at_random_give_the_bits_of_plain_training(seed):
    assert_same(seed)


def test_every_choice_is_drawn_in_the_first_320_seeds():
    recipes = [Recipe.draw(seed) for seed in range(ALL)]
    steps = [step for recipe in recipes for step in recipe.steps]
    for field in ("backward", "zero", "gradients", "edit", "fails", "hyper", "evaluate_last"):
        drawn = {getattr(step, field) for step in steps}
        assert len(drawn) >= 3, field
    assert any(step.frozen and step.infinite for step in steps)
    assert any(step.resumes and step.backward == "two losses" for step in steps)
    assert {recipe.checkpointing for recipe in recipes} == {
        "", "reentrant", "non-reentrant", "over two",
    }  # fmt: skip
    assert sum(leg.get("plain", False) for recipe in recipes for leg in recipe.legs) > 10


def test_a_loop_that_does_something_else_is_seen():
    """The comparison can fail: one gradient edit more."""
    recipe = Recipe.draw(0)
    expected = run(recipe, ours=False)
    recipe.steps[-1] = Step(gradients="halved")
    ours = run(recipe, ours=True)
    ours.losses = expected.losses = []
    with pytest.raises(AssertionError):
        assert_bit_equal(ours, expected)
