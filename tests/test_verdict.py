"""What a run says about its success: nothing learned, a change within the error, the sentence."""

import math

import pytest

from easyrl.config import load_config
from easyrl.data.hub import resolve_model
from easyrl.model.loading import load_policy
from easyrl.runtime.resolve import resolve
from easyrl.runtime.verdict import Change, nothing_learned, sentence
from runs import SMALL, easyrl, succeed, summary_of

SPEC = resolve(load_config())
TRAINED = {
    "reward": 0.25,
    "frac_reward_zero_std": 0.5,
    "grad_norm": 1.5,
    "learning_rate": 1e-5,
    "num_updates_not_finite": 0,
}
EQUAL = {**TRAINED, "frac_reward_zero_std": 1.0, "grad_norm": 0.0}
DROPPED = {**TRAINED, "grad_norm": None, "num_updates_not_finite": 1}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], None),
        ([TRAINED], None),
        ([EQUAL, TRAINED], None),
        ([EQUAL, DROPPED, TRAINED], None),
        ([EQUAL, EQUAL], "all rewards were 0.250, so no group had a gradient and the weights"),
        ([EQUAL, {**EQUAL, "reward": 1.0}], "in each group all rewards were equal, so no group"),
        ([{**EQUAL, "reward": None, "frac_reward_zero_std": None}], "no group has got a reward"),
        # The KL term has trained, the rewards have not.
        ([{**EQUAL, "grad_norm": 0.1}], "no group had a gradient from its rewards"),
        ([DROPPED, DROPPED], "no update was finite"),
        ([{**TRAINED, "learning_rate": 0.0}, EQUAL], "the weights are unchanged"),
    ],
)
def test_nothing_is_learned_if_no_iteration_changes_the_weights_by_its_rewards(lines, reason):
    found = nothing_learned(lines, SPEC)
    if reason is None:
        assert found is None
    else:
        assert reason in found.reason and len(found.causes) == 3


def test_a_limit_that_nearly_all_completions_reach_is_the_first_cause():
    found = nothing_learned([{**EQUAL, "completions/clipped_ratio": 0.96}], SPEC)
    assert found is not None and len(found.causes) == 3
    assert found.causes[0].startswith("96% of the completions were cut off after 256 tokens")
    found = nothing_learned([{**EQUAL, "completions/clipped_ratio": 0.5}], SPEC)
    assert found is not None and "data.columns" in found.causes[0]


def test_a_teacher_trains_without_rewards():
    config = load_config(words=["algorithm.teacher=tiny", "reward.functions=none"])
    spec = resolve(config)
    assert nothing_learned([{**EQUAL, "grad_norm": 0.1}], spec) is None
    found = nothing_learned([EQUAL], spec)
    assert found is not None and found.reason.startswith("the teacher gave no gradient")
    assert "algorithm.teacher" in found.causes[0]
    summary = {"reward_first": None, "teacher_kl_first": 0.0123, "teacher_kl_last": 0.001}
    assert sentence(summary) == "KL divergence from the teacher 0.0123 to 0.001"


@pytest.mark.parametrize(
    ("after", "errors", "is_clear"),
    [
        (0.5, (0.04, 0.04), True),  # 0.2 is more than 2 x 0.057
        (0.4, (0.04, 0.04), False),
        (0.2, (0.03, 0.03), True),  # a fall is clear, too
        (0.9, (None, 0.04), None),
        (0.9, (0.04, math.nan), None),
    ],
)
def test_a_change_is_clear_if_it_is_larger_than_two_of_its_errors(after, errors, is_clear):
    assert Change(0.3, after, *errors).is_clear is is_clear


def test_the_sentence_has_the_numbers_of_the_summary():
    summary = {"accuracy_before": 0.3125, "accuracy_after": 0.5, "held_out_problems": 128}
    summary |= {"error_before": 0.041, "error_after": 0.044}
    assert sentence(summary) == "held-out accuracy 0.31 to 0.50 ± 0.04 on 128 problems"
    unclear = {**summary, "accuracy_after": 0.36}
    assert sentence(unclear).endswith("0.36 ± 0.04 on 128 problems: no clear change")
    assert sentence({"reward_first": 0.25, "reward_last": 1.0}).startswith("reward 0.25 to 1 on")
    assert sentence({"reward_first": None}) == "no reward so far"


def test_a_run_whose_rewards_are_equal_says_that_it_has_learned_nothing(tmp_path):
    """And it is true: the weights that it saves are those that it started with."""
    rewards = tmp_path / "own.py"
    rewards.write_text("def nothing(completions, **_): return [0.0 for _ in completions]\n")
    folder = tmp_path / "run"
    words = ("--output", str(folder), "--iterations", "3", *SMALL)
    out = succeed(*words, "--reward", f"{rewards}:nothing", "data.num_held_out=4")
    summary = summary_of(folder)
    assert summary["nothing_learned"]["reason"].startswith("all rewards were 0.000, so no group")
    assert summary["weights_sha256"] == load_policy(resolve_model("tiny")).weights_sha256()
    assert summary["held_out_problems"] == 4
    end = out[out.index("finished") :]
    assert end.startswith("finished, but nothing was learned: all rewards were 0.000")
    for text in ("data.columns", "rollout.temperature", "easyrl samples"):
        assert text in end
    assert "--resume" not in end  # more iterations would not help
    assert easyrl("report", folder).exit_code == 0
    page = (folder / "report.html").read_text()
    assert page.index("nothing was learned") < page.index("<table") and "data.columns" in page


def test_a_run_that_has_learned_does_not(finished_run):
    summary = summary_of(finished_run.folder)
    assert summary["nothing_learned"] is None and "nothing was learned" not in finished_run.out
    assert summary["weights_sha256"] != load_policy(resolve_model("tiny")).weights_sha256()
    assert summary["error_before"] is not None and summary["error_after"] is not None
