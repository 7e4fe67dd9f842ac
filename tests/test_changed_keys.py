"""Config keys of earlier releases."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from easyrl.config import ConfigError, load_config
from easyrl.config.changed_keys import REMOVED, RENAMED

OLD_RUN = Path(__file__).parent / "fixtures" / "run_before_0_2" / "run" / "config.yaml"


def test_config_of_an_older_run_loads_without_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    text = OLD_RUN.read_text()
    assert all(f" {name.rpartition('.')[2]}:" in text for name in [*REMOVED, *RENAMED])
    assert load_config(OLD_RUN).reward.functions == ["regex"]
    assert capsys.readouterr() == ("", "")


def test_removed_key_that_is_set_is_refused_with_its_reason() -> None:
    for name, (default, reason) in REMOVED.items():
        load_config(flags={name: default})
        with pytest.raises(ConfigError) as refused:
            load_config(words=[f"{name}=7"])
        assert f"{name}: " in str(refused.value) and reason in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("devices.infer_threads=3", "devices.threads=3"),
        ("reward.answer_column=solution", "data.columns={answer: solution}"),
        ("reward.code_tests_column=x data.columns={a:\\ b}", "data.columns={a: b, tests: x}"),
        ("reward.answer_column=x data.columns={answer:\\ b}", "data.columns={answer: b}"),
    ],
)
def test_renamed_key_works_with_a_warning(
    old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_config(words=shlex.split(old)) == load_config(words=[new])
    assert "warning" in capsys.readouterr().err


def test_removed_key_in_a_file_names_the_file_to_change(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("rollout:\n  min_p: 0.1\n")
    with pytest.raises(ConfigError, match=str(file)):
        load_config(file)
