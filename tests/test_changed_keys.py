"""Config keys of earlier releases."""

from __future__ import annotations

from pathlib import Path

import pytest

from easyrl.config import ConfigError, load_config
from easyrl.config.changed_keys import MERGED, REMOVED, RENAMED

OLD_RUN = Path(__file__).parent / "fixtures" / "run_before_0_2" / "run" / "config.yaml"


def test_config_of_an_older_run_loads_without_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    text = OLD_RUN.read_text()
    assert all(f" {name.rpartition('.')[2]}:" in text for name in [*REMOVED, *RENAMED, *MERGED])
    assert load_config(OLD_RUN).reward.functions == ["regex"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", REMOVED)
def test_removed_key_that_is_set_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(words=[f"{name}=7"])
    assert f"{name}: " in str(refused.value) and REMOVED[name][1] in str(refused.value)


def test_removed_key_at_its_old_default_is_ignored() -> None:
    assert load_config(words=["rollout.min_p=0.0", "output.project=easyrl"]) == load_config()


def test_renamed_key_works_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_config(words=["devices.infer_threads=3"]).devices.threads == 3
    assert "devices.threads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("data.dataset=a/b data.subset=main", "data.dataset=a/b:main"),
        ("data.dataset=a/b data.split=test", "data.dataset=a/b::test"),
        ("data.dataset=[a,b] data.subset=s data.split=t", "data.dataset=[a:s:t,b:s:t]"),
        ("eval.dataset=a/b eval.subset=7 eval.split=test", "eval.dataset=a/b:7:test"),
        ("reward.answer_column=solution", 'data.columns={"answer":"solution"}'),
        (
            'reward.code_tests_column=cases data.columns={"id":"number"}',
            'data.columns={"id":"number","tests":"cases"}',
        ),
    ],
)
def test_merged_keys_mean_the_same_as_before(
    old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_config(words=old.split()) == load_config(words=[new])
    assert "warning" in capsys.readouterr().err


def test_split_of_a_folder_is_the_folder_inside(tmp_path: Path) -> None:
    words = [f"data.dataset={tmp_path}", "data.split=test"]
    assert load_config(words=words).data.dataset == f"{tmp_path}/test"


@pytest.mark.parametrize("word", ["eval.split=test", "data.subset=[1]"])
def test_merged_key_that_cannot_be_merged_is_named(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        load_config(words=[word])


def test_removed_key_in_a_file_names_the_file_to_change(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("rollout:\n  min_p: 0.1\n")
    with pytest.raises(ConfigError, match=str(file)):
        load_config(file)
