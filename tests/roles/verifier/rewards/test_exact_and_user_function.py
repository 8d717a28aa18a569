"""Rewards that need no mathematics: exact texts, and functions of the user's own."""

from __future__ import annotations

import pytest

from protocol.errors import OperatorError
from protocol.reasons import Unscorable
from protocol.runspec import RewardSpec
from roles.verifier.rewards.registry import open_reward, refuse_foreign
from roles.verifier.rewards.reward import Item, Reward, Score
from roles.verifier.rewards.scorer import Scored, weighed

FUNCTIONS = "tests.roles.verifier.rewards.reward_functions"


async def score(name: str, text: str, answer: str | None, **metadata: object) -> Score:
    reward = open_reward(RewardSpec(name=name))
    assert isinstance(reward, Reward)
    return await reward.score(Item(text, answer, metadata=metadata))


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("1 2 3", "1 2 3", 1.0),
        ("  1 2 3\r\n", "1 2 3", 1.0),
        ("cafe\u0301", "caf\u00e9", 1.0),
        ("a\r\nb", "a\nb", 1.0),
        ("1 2  3", "1 2 3", 0.0),
        ("Yes", "yes", 0.0),
        ("1 2 3.", "1 2 3", 0.0),
        ("", "1 2 3", 0.0),
        ("10", "10", 1.0),
    ],
)
async def test_exact_compares_whole_stripped_texts(completion: str, answer: str, value: float):
    assert await score("exact", completion, answer) == Score(value)


@pytest.mark.parametrize("answer", [None, "", " \n"])
@pytest.mark.parametrize("completion", ["", "x"])
async def test_exact_never_rewards_a_row_without_an_answer(completion: str, answer: str | None):
    assert (await score("exact", completion, answer)).unscorable is Unscorable.NO_ANSWER


async def test_a_user_function_gets_text_and_answer():
    assert await score(f"{FUNCTIONS}:length", "four", None) == Score(4.0)


async def test_a_user_function_may_be_async():
    assert await score(f"{FUNCTIONS}:slowly_right", "7", "7") == Score(1.0)


async def test_a_user_function_gets_the_metadata_that_it_names():
    assert await score(f"{FUNCTIONS}:level", "x", "x", level=5, topic="algebra") == Score(0.5)


async def test_metadata_never_collides_with_completion_and_answer():
    assert await score(f"{FUNCTIONS}:everything", "x", "x", completion="other", topic="algebra") == Score(1.0)


@pytest.mark.parametrize(
    ("function", "note"), [("nothing", "returned None"), ("not_a_number", "returned nan")]
)
async def test_what_is_no_number_is_unscorable_and_not_zero(function: str, note: str):
    found = await score(f"{FUNCTIONS}:{function}", "x", "x")
    assert found == Score(None, Unscorable.REWARD_FAILED, note)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mathh", "exact, math"),
        ("no_such_module:f", "no module 'no_such_module'"),
        (f"{FUNCTIONS}:no_such_function", "has no no_such_function"),
        (f"{FUNCTIONS}:TUPLE", "tuple is no function"),
        (":f", "cannot import"),
    ],
)
def test_a_reward_that_cannot_be_opened_is_the_operators_mistake(name: str, says: str):
    with pytest.raises(OperatorError, match=says) as caught:
        open_reward(RewardSpec(name=name))
    assert "\n" not in str(caught.value)


OWN = [
    RewardSpec(name="exact"),
    RewardSpec(name="reasoning-gym:chain_sum"),
    RewardSpec(name="mine.rewards:f"),
]


@pytest.mark.parametrize("allowed", [["mine.rewards"], ["other", "mine"]])
def test_a_module_that_the_operator_allows_may_be_imported(allowed: list[str]):
    refuse_foreign(OWN, allowed)


@pytest.mark.parametrize("allowed", [[], ["mine.reward"], ["mine.rewards.f"], ["min"], [""]])
def test_a_module_that_the_operator_does_not_allow_is_refused_by_name(allowed: list[str]):
    with pytest.raises(OperatorError, match=r"start the verifier with --allow-module mine\.rewards$"):
        refuse_foreign(OWN, allowed)


def test_rewards_that_import_nothing_of_a_persons_own_need_no_permission():
    refuse_foreign(OWN[:2], [])


TWO = (RewardSpec(name="exact", weight=2.0), RewardSpec(name="a:b", weight=-0.5))


def test_rewards_are_summed_by_weight():
    found = weighed(TWO, [Score(1.0), Score(0.5, note="timeout")])
    assert found == Scored(1.75, {"exact": 1.0, "a:b": 0.5}, None, "timeout")


def test_one_unscorable_reward_makes_the_rollout_unscorable():
    found = weighed(TWO, [Score(1.0), Score.none(Unscorable.REWARD_FAILED, "KeyError")])
    assert found == Scored(None, {"exact": 1.0, "a:b": None}, Unscorable.REWARD_FAILED, "KeyError")


def test_a_sum_that_is_not_finite_is_unscorable():
    huge = (RewardSpec(name="a:b", weight=1e308), RewardSpec(name="a:c", weight=1e308))
    assert weighed(huge, [Score(1.0), Score(1.0)]).unscorable is Unscorable.REWARD_FAILED
