"""`make first-gpu`: its limits, its results, and rehearsals of the whole script, which
`make test-pretended` runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_pretended import ENVIRONMENT, LIBRARY

from benchmarks.first_gpu import hardware_table, readers, steps
from benchmarks.first_gpu.__main__ import main
from benchmarks.first_gpu.commands import ROOT
from benchmarks.first_gpu.results import Results, StepResult, merge, read_results, table
from easyrl.formatting import ConfigError
from own_processes import WAIT_SECONDS, popen
from runs import customized

MACHINE = {
    "device": "NVIDIA H200",
    "EasyRL": "0.2",
    "torch": "2.11.0+cu130",
    "transformers": "5.17.0",
    "Python": "3.12.3",
}
LEARNED = StepResult(
    part=1,
    name="demo learns",
    status="ended",
    seconds=71.0,
    reason="at its limit of 80 s",
    figures={"iterations": 30, "held_out_accuracy": [0.48, 0.7, 0.93], "standard_error": 0.011},
)
PERIODIC = StepResult(
    part=2, name="demo, periodic", status="passed", figures={"same_bits_as_sync": False}
)
NO_FOLDER = StepResult(part=4, name="bench peer, smollm2", status="skipped", reason="no folder")
PEER = StepResult(
    part=4, name="bench peer, smollm2", status="passed", figures={"ratio": 5.25, "peer": "TRL 1.16"}
)
HANGING = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(1000)
"""
LIMITED = """
import sys
from pathlib import Path
from benchmarks.first_gpu import commands
commands.GRACE_SECONDS = 0.5
for program in sys.argv[2:]:
    ended = commands.run_command([sys.executable, "-c", program], 3.0, Path(sys.argv[1]))
    print(ended.exit_code, ended.output)
"""
TESTED = """
from easyrl.runtime import self_test
self_test.before_run = lambda *_: ({}, [])
"""
"""Runs take the devices as tested. On a CPU the self-test takes minutes in bfloat16."""


def test_a_command_that_hangs_is_ended_with_its_processes_and_the_next_one_runs(tmp_path):
    words = [sys.executable, "-c", LIMITED, tmp_path / "log", HANGING, "print('next')"]
    process = popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    printed, _ = process.communicate(timeout=WAIT_SECONDS)
    first, child, second, text = printed.split()
    assert (first, second, text) == ("None", "0", "next")
    assert not Path("/proc", child).exists()


def test_a_newer_result_counts_and_a_skipped_step_keeps_the_older_one(tmp_path):
    first, second = (Results(MACHINE, is_rehearsal=False) for _ in range(2))
    for each in (LEARNED, NO_FOLDER):
        first.add(each)
    for each in (PEER, StepResult(part=1, name="demo learns", status="skipped")):
        second.add(each)
    first.write(tmp_path)
    merged = merge([read_results(tmp_path / "results.json"), second])
    assert merged.steps == {each.name: each for each in (LEARNED, PEER)}
    with pytest.raises(ValueError, match="one machine"):
        merge([first, Results(MACHINE | {"device": "NVIDIA L4"}, is_rehearsal=False)])


def copy_pages(folder):
    (folder / "docs").mkdir()
    for name in ("README.md", "docs/devices.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def test_results_become_a_row_of_the_readme_and_a_table_in_the_docs(tmp_path):
    results = Results(MACHINE, is_rehearsal=False)
    root = copy_pages(tmp_path)
    before = (root / "README.md").read_text().splitlines()
    for step in (LEARNED, PERIODIC, NO_FOLDER):
        results.add(step)
        results.write(tmp_path)
        hardware_table.main([str(tmp_path / "results.json"), "--root", str(root)])
    after = (root / "README.md").read_text().splitlines()
    (row,) = [line for line in after if line not in before]
    assert [line for line in after if line != row] == before
    assert row.startswith("| one NVIDIA H200 (torch 2.11, transformers 5.17, Python 3.12) |")
    assert "held-out accuracy 0.48 → 0.93 (± 0.01) in 30 iterations (ended" in row
    assert "other bits than sync" in row and "not run: bench peer, smollm2" in row
    page = (root / "docs/devices.md").read_text()
    assert page.count("| 1 | demo learns |") == 1 and "0.48 → 0.7 → 0.93" in page


def test_results_of_a_rehearsal_are_only_written_to_a_copy(tmp_path):
    results = Results(MACHINE, is_rehearsal=True)
    results.add(LEARNED)
    results.write(tmp_path)
    with pytest.raises(SystemExit, match="rehearsal"):
        hardware_table.main([str(tmp_path / "results.json")])


def test_a_cell_has_no_line_ends_and_no_bars():
    results = Results(MACHINE, is_rehearsal=False)
    results.add(StepResult(part=1, name="a", status="failed", reason="x | y\nz"))
    *_, line = table(results)
    assert "x / y z" in line and line.count("|") == 6


@pytest.mark.parametrize(
    "words", [["--parts", "0-2"], ["--parts", "3-2"], ["--parts", "x"], ["--smollm2", "nowhere"]]
)
def test_wrong_arguments_are_named(words, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert words[0] in capsys.readouterr().err


def test_a_folder_without_packages_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--wheels"):
        main(["--wheels", str(tmp_path)])


def test_missing_packages_are_named_before_anything_runs(tmp_path):
    """As on a machine that has torch and transformers, but not what the core needs besides."""
    program = "import sys; sys.modules['pydantic'] = None; sys.argv[1:] = ['--list']; "
    program += "import runpy; runpy.run_module('benchmarks.first_gpu', run_name='__main__')"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "pydantic" in done.stderr and "--wheels" in done.stderr
    assert "Traceback" not in done.stderr


def test_outcomes_of_tests_that_have_run_are_counted_also_if_the_rest_was_ended():
    output = """
[gw0] [ 10%] PASSED tests/test_gpu.py::test_a[sync model.dtype=bfloat16]
tests/test_gpu.py::test_b
[gw1] [ 20%] FAILED tests/test_gpu.py::test_b
FAILED tests/test_gpu.py::test_b - AssertionError: x
"""
    expected = {"passed": 1, "failed": 1, "tests_that_failed": "test_b"}
    assert readers.read_tests(output) == expected


def test_whole_runs_are_among_the_tests_for_gpus():
    code = (ROOT / "tests" / "test_gpu.py").read_text()
    for name in steps.WHOLE_RUNS.split(" or "):
        assert name in code, name


def rehearse(folder, *words, **environment):
    """Rehearse in a process of its own; return the results."""
    environment |= {"OUT": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.first_gpu", "--rehearsal", *map(str, words)]
    process = popen(command, cwd=ROOT, env={**os.environ, **environment})
    assert process.wait() == 0
    return read_results(folder / "results.json")


def assert_rehearsed(results, parts):
    """Nothing failed. What may be ended has other tests."""
    assert {step.part for step in results.steps.values()} == set(parts)
    for step in results.steps.values():
        may_end = step.name in steps.ONE_SIZE
        assert step.status == "passed" or (may_end and step.status == "ended"), step


@pytest.mark.pretended
@pytest.mark.timeout(5400)
@pytest.mark.skipif("PRETENDED" not in os.environ, reason="make test-pretended")
def test_rehearsal_on_the_cpu_in_two_calls(tmp_path):
    chat = shutil.copytree(ROOT / "easyrl/model/built_in/tiny", tmp_path / "chat")
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (chat / "chat_template.jinja").write_text(template)
    words = ["--device", "cpu", "--smollm2", chat, "--minutes", "60"]
    rehearse(tmp_path, "--parts", "1-3", *words)
    results = rehearse(tmp_path, "--parts", "4-5", *words)
    assert_rehearsed(results, parts=range(1, 6))
    for model in ("demo", "tiny-hybrid", "SmolLM2-135M"):
        learned = results.steps[f"{model} learns"].figures
        assert learned["iterations"] == 1 and len(learned["held_out_accuracy"]) == 2
        assert results.steps[f"{model}, periodic"].figures["same_bits_as_sync"] is True
    assert results.steps["demo, sync"].figures["gap_max"] < 1e-4
    assert results.steps["bench loop, small"].figures["both_busy"] >= 0
    for row in ("smollm2", "tiny_long"):
        assert results.steps[f"bench peer, {row}"].figures["ratio"] > 0
    for name in ("whole runs", "kernels and parts"):
        assert results.steps[name].figures["skipped"] > 0
    root = copy_pages(tmp_path)
    hardware_table.main([str(tmp_path / "results.json"), "--root", str(root)])
    assert "| one CPU (torch" in (root / "README.md").read_text()


@pytest.mark.pretended
@pytest.mark.timeout(5400)
@pytest.mark.skipif(not LIBRARY, reason="make test-pretended; needs a C++ compiler")
def test_rehearsal_on_a_pretended_device(tmp_path):
    tested = customized(tmp_path, TESTED)["PYTHONPATH"]
    paths = os.pathsep.join([tested, ENVIRONMENT["PYTHONPATH"]])
    words = ["--device", "0", "--parts", "1-3", "--minutes", "60"]
    results = rehearse(tmp_path, *words, **ENVIRONMENT | {"PYTHONPATH": paths})
    assert results.machine["device"] == "Ascend pretended"
    skipped = [step for step in results.steps.values() if step.status == "skipped"]
    assert {step.reason for step in skipped} == {"--smollm2 FOLDER was not given"}
    for step in skipped:
        del results.steps[step.name]
    assert_rehearsed(results, parts=range(1, 4))
    assert results.steps["demo, periodic"].figures["same_bits_as_sync"] is True
