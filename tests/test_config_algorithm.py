"""Section `algorithm`: what its defaults mean, and which keys do not go together."""

from __future__ import annotations

import pytest

from easyrl.config import Config, ConfigError, load_config


def loaded(*words: str) -> Config:
    return load_config(None, {}, [f"algorithm.{word}" for word in words])


def error_of(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(*words)
    return str(caught.value)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_the_upper_clip_is_epsilon_unless_it_is_given(loss_type: str) -> None:
    word = f"loss_type={loss_type}"
    assert loaded(word, "epsilon=0.1").algorithm.resolved_epsilon_high == 0.1
    assert loaded(word, "epsilon_high=0.28").algorithm.resolved_epsilon_high == 0.28


def test_the_upper_clip_of_cispo_is_a_ratio() -> None:
    assert loaded("loss_type=cispo").algorithm.resolved_epsilon_high == 5.0
    assert loaded("loss_type=cispo", "epsilon_high=1").algorithm.resolved_epsilon_high == 1.0


def test_auto_corrects_nothing_in_float32() -> None:
    assert loaded().importance_sampling_correction == "none"
    for kind in ("none", "truncate", "mask"):
        chosen = loaded(f"importance_sampling_correction={kind}")
        assert chosen.importance_sampling_correction == kind


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], False), (["beta=0.01"], True), (["entropy_coef=0.01"], True)],
)
def test_advantages_of_zero_are_trained_where_they_have_a_gradient(
    words: list[str], expected: bool
) -> None:
    assert loaded(*words).algorithm.trains_zero_advantages is expected


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("value", ["1", "5"])
def test_a_ratio_is_no_upper_clip_of_the_other_losses(loss_type: str, value: str) -> None:
    message = error_of(f"loss_type={loss_type}", f"epsilon_high={value}")
    assert message.startswith(f"algorithm.epsilon_high: {float(value)} came")
    assert f"algorithm.loss_type={loss_type}" in message
    assert message.endswith("accepted: under 1, or null (algorithm.epsilon)")


def test_a_distance_from_one_is_no_upper_clip_of_cispo() -> None:
    message = error_of("loss_type=cispo", "epsilon_high=0.28")
    assert message.startswith("algorithm.epsilon_high: 0.28 came")
    assert "algorithm.loss_type=cispo" in message
    assert message.endswith("accepted: at least 1, or null (5)")


@pytest.mark.parametrize(
    ("words", "smallest"),
    [
        (["delta=1.2"], "1.2"),
        (["delta=0.5"], "1.2"),
        (["delta=1.28", "epsilon_high=0.28"], "1.28"),
        (["delta=1.3", "epsilon=0.4"], "1.4"),
    ],
)
def test_delta_is_beyond_the_clip(words: list[str], smallest: str) -> None:
    message = error_of(*words)
    assert message.startswith("algorithm.delta: ") and "algorithm.epsilon_high" in message
    assert message.endswith(f"accepted: over {smallest}, or null")


def test_delta_beyond_the_clip_is_fine() -> None:
    assert loaded("delta=4", "epsilon_high=0.28").algorithm.delta == 4.0


def test_cispo_has_no_delta() -> None:
    message = error_of("loss_type=cispo", "delta=8")
    assert "algorithm.delta: 8.0" in message and "algorithm.loss_type=cispo" in message


def test_both_problems_of_the_clips_are_told() -> None:
    problems = error_of("loss_type=cispo", "delta=8", "epsilon_high=0.2").splitlines()
    assert [problem.partition(":")[0] for problem in problems] == [
        "algorithm.epsilon_high",
        "algorithm.delta",
    ]


@pytest.mark.parametrize(
    ("word", "accepted"),
    [
        ("loss_type=ppo", "'grpo', 'dapo', 'dr_grpo' or 'cispo'"),
        ("importance_sampling_level=completion", "'token' or 'sequence'"),
        ("advantage_estimator=gae", "'group' or 'rloo'"),
        ("importance_sampling_correction=clip", "'none', 'truncate', 'mask' or 'auto'"),
        ("beta=-0.1", "greater than or equal to 0"),
        ("entropy_coef=-0.1", "greater than or equal to 0"),
        ("epsilon=0", "greater than 0"),
        ("epsilon=1", "less than 1"),
        ("epsilon_high=0", "greater than 0"),
        ("importance_sampling_cap=1", "greater than 1"),
        ("mask_truncated_completions=yes", "true or false"),
    ],
)
def test_values_out_of_range_are_named(word: str, accepted: str) -> None:
    message = error_of(word)
    assert message.startswith(f"algorithm.{word.partition('=')[0]}: ")
    assert message.endswith(f"accepted: {accepted}")
